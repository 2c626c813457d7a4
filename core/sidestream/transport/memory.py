"""Anonymous shared memory: sealed memfds, mapped without keeping a descriptor.

A memfd has no name, so nothing is left behind by a kill, and is not bound by the size of
``/dev/shm``. It is sealed against resizing and its pages exist before anybody writes, so neither
side can get a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sidestream.errors import SidestreamError
from sidestream.transport.memory_limit import available_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAP_FIXED: Final = 0x10  # linux/mman.h; the mmap module has no name for it
_MADV_REMOVE: Final = 9  # linux/mman.h
_MADV_POPULATE_WRITE: Final = 23  # linux/mman.h, Linux 5.14
_MADV_COLLAPSE: Final = 25  # linux/mman.h, Linux 6.1
_MFD_NOEXEC_SEAL: Final = 0x8  # linux/memfd.h, Linux 6.3; required where vm.memfd_noexec is 2

#: A huge page of most machines; elsewhere nothing is won and nothing lost.
_HUGE_PAGE_BYTES: Final = 2 << 20
#: CPU time that one may take on average: 0.3 ms, and as many small pages 1 to 2, but some take 10
#: where memory is in pieces and the kernel has to move others' pages first.
_HUGE_PAGE_S: Final = 0.001


# In this order: pickle makes an error by the __new__ that is found first, and Python lets that be
# MemoryError's only if MemoryError is the first base.
class HostMemoryError(MemoryError, SidestreamError):
    """Shared host memory can't be had; nothing was written and nothing is left behind."""

    def __init__(self, nbytes: int, reason: str) -> None:
        super().__init__(
            f"{nbytes} bytes of shared host memory can't be had: {reason}. Take or drop outputs "
            "that are held, make smaller ones, or raise the limit."
        )
        #: What was asked for.
        self.nbytes = nbytes
        self.reason = reason


class Mapping:
    """A memfd's bytes in this process; unmapped when the last view of them is gone."""

    def __init__(self, fd: int, nbytes: int, *, start: int = 0, is_private: bool = False) -> None:
        """Map a part of ``fd``, which the caller may close afterwards.

        Args:
            start: A multiple of the page size.
            is_private: Writes stay in this process, page by page; needed for a memfd that is
                sealed against writing.

        Raises:
            OSError: The kernel refused.
        """
        # mmap.mmap(fd) keeps a duplicate of the descriptor before 3.13, and 1,000 held outputs must
        # not need 1,000 descriptors: an anonymous map reserves the address range and owns it, the
        # memfd is put over it.
        is_aligned = nbytes >= _HUGE_PAGE_BYTES and not start
        reserved = nbytes + _HUGE_PAGE_BYTES if is_aligned else nbytes
        memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._skipped: Final = -address % _HUGE_PAGE_BYTES if is_aligned else 0
        #: A multiple of a huge page's size where one fits, so that the kernel can map it as one.
        self.address: Final = address + self._skipped
        self.nbytes: Final = nbytes
        sharing = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        placed = _LIBC.mmap(
            self.address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, sharing | _MAP_FIXED, fd, start
        )
        if placed != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._memory: Final = memory

    def array(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """View a range as uint8; a new object each time, which every view of it keeps alive."""
        return np.frombuffer(
            self._memory, dtype=np.uint8, count=nbytes, offset=self._skipped + offset
        )

    def view(self) -> memoryview:
        """View everything."""
        return memoryview(self._memory)[self._skipped : self._skipped + self.nbytes]

    def free_pages(self) -> None:
        """Give the memory back now, whoever else has it mapped; it reads as zeros from then on."""
        # Where the kernel refuses, the memory goes with the last mapping.
        _LIBC.madvise(self.address, self.nbytes, _MADV_REMOVE)


def allocate(nbytes: int) -> tuple[int, Mapping]:
    """Make a sealed memfd whose pages all exist, and map it.

    Returns:
        The descriptor, which is the caller's to close, and the mapping.

    Raises:
        HostMemoryError: A limit would be passed.
    """
    fd = _create(nbytes)
    try:
        mapping = Mapping(fd, nbytes)
        _populate(fd, mapping)
        _seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise HostMemoryError(nbytes, error.strerror or str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def share(data: ReadableBuffer) -> int:
    """Copy ``data`` into a memfd that nobody can change any more.

    Returns:
        The descriptor, which is the caller's to close.

    Raises:
        HostMemoryError: A limit would be passed.
    """
    left = memoryview(data).cast("B")
    nbytes, position = len(left), 0
    fd = _create(nbytes)
    try:
        # pwrite and not a mapping: half the page-fault cost on fresh pages, and no GIL.
        while position < nbytes:
            position += os.pwrite(fd, left[position:], position)
        _seal(fd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError as error:
        os.close(fd)
        raise HostMemoryError(nbytes, error.strerror or str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, nbytes: int, *, part: slice = slice(None), is_private: bool = False) -> Mapping:
    """Map a memfd of ``nbytes`` that another process made; ``fd`` stays open.

    Args:
        part: What to map of it, from a multiple of the page size on.

    Raises:
        ValueError: It has another size, or could still be shrunk under the reader.
        HostMemoryError: This process may not map that much.
    """
    size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if size != nbytes or not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError(
            f"A memfd of {size} bytes with seals {seals:#x} arrived where {nbytes} sealed bytes "
            "were announced."
        )
    start, stop, _ = part.indices(nbytes)
    try:
        return Mapping(fd, stop - start, start=start, is_private=is_private)
    except OSError as error:
        raise HostMemoryError(stop - start, error.strerror or str(error)) from error


def _create(nbytes: int) -> int:
    """Make a memfd of ``nbytes`` without pages yet."""
    allowed = available_bytes()
    if allowed is not None and nbytes > allowed:
        raise HostMemoryError(nbytes, f"the memory limit leaves {allowed} bytes")
    try:
        fd = _memfd()
    except OSError as error:
        raise HostMemoryError(nbytes, error.strerror or str(error)) from error
    try:
        os.ftruncate(fd, nbytes)  # EFBIG over RLIMIT_FSIZE; Python ignores SIGXFSZ
    except OSError as error:
        os.close(fd)
        raise HostMemoryError(nbytes, error.strerror or str(error)) from error
    return fd


def _seal(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("sidestream", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("sidestream", flags)


def _populate(fd: int, mapping: Mapping) -> None:
    """Make every page exist now: too little memory is an error here and a SIGBUS later."""
    _make_huge_pages(mapping)
    # ctypes and not mmap.madvise, which holds the GIL for as long as the pages take.
    if _LIBC.madvise(mapping.address, mapping.nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    os.posix_fallocate(fd, 0, mapping.nbytes)  # Linux before 5.14


def _make_huge_pages(mapping: Mapping) -> None:
    """Let as much as the kernel is willing to consist of huge pages; the rest has no pages yet.

    They are made in a tenth of the time, and both sides copy and read faster for want of page
    faults and of misses of the address translation. This needs no setting of the machine.
    """
    end = mapping.address + mapping.nbytes
    until_s = time.thread_time() + mapping.nbytes / _HUGE_PAGE_BYTES * _HUGE_PAGE_S
    for start in range(mapping.address, end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES):
        # The kernel makes one of small pages only, and a single one will do.
        if _LIBC.madvise(start, mmap.PAGESIZE, _MADV_POPULATE_WRITE) != 0:
            return
        if _LIBC.madvise(start, _HUGE_PAGE_BYTES, _MADV_COLLAPSE) != 0:
            return
        if time.thread_time() > until_s:
            return
