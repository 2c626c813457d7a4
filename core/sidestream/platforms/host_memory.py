"""Page-locking of mappings that exist already, for vendors whose runtime registers host memory."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sidestream.errors import PlatformError

logger = logging.getLogger(__name__)

#: Runtimes refuse ranges far below what they promise (CUDA: 512 GiB); no arena comes near this.
MAX_LOCKED_BYTES: Final = 64 << 30


class LockedMapping:
    """A registered range of host memory.

    States: locked, then closed. A close that fails leaves it locked, and the mapping has to stay:
    the device may still write to its pages.
    """

    def __init__(self, platform: str, address: int, unregister: Callable[[], int]) -> None:
        self._platform: Final = platform
        self._address: Final = address
        self._unregister: Final = unregister
        self._pid: Final = os.getpid()
        self._is_locked = True

    def close(self) -> None:
        """Unlock the pages; idempotent, and nothing in a forked child, which inherits no lock.

        Raises:
            PlatformError: The runtime refused; keep the mapping.
        """
        if not self._is_locked or os.getpid() != self._pid:
            return
        code = self._unregister()
        if code != 0:
            raise PlatformError(
                f"Platform {self._platform!r} could not unlock the host memory at "
                f"{self._address:#x} (code {code}). The mapping has to stay for as long as the "
                "process lives.",
                platform=self._platform,
            )
        self._is_locked = False


@dataclass(frozen=True, kw_only=True)
class HostRuntime:
    """What a vendor's runtime calls its functions that page-lock mappings.

    ``register(address, nbytes, flags)`` and ``unregister(address)`` give a code, 0 for success.
    """

    #: The function of the vendor's torch module that gives the runtime.
    getter: str
    register: str
    unregister: str
    flags: int = 0
    #: A library and its function for :func:`clear_pending_error`, where failed calls leave one.
    clear_error: tuple[str, str] | None = None

    def lock(
        self,
        platform: str,
        functions: Any,
        address: int,
        nbytes: int,
        *,
        inside: Callable[[], AbstractContextManager[Any]],
    ) -> LockedMapping | None:
        """Page-lock a mapping by ``functions``, the runtime, each call ``inside`` a context.

        Raises:
            PlatformError: As :func:`lock_mapping`.
        """

        def call(name: str, *arguments: int) -> int:
            with inside():
                code = int(getattr(functions, name)(*arguments))
                if code != 0 and self.clear_error is not None:
                    clear_pending_error(*self.clear_error)
                return code

        return lock_mapping(
            platform,
            address,
            nbytes,
            register=lambda: call(self.register, address, nbytes, self.flags),
            unregister=lambda: call(self.unregister, address),
        )


def lock_mapping(
    platform: str,
    address: int,
    nbytes: int,
    *,
    register: Callable[[], int],
    unregister: Callable[[], int],
) -> LockedMapping | None:
    """Register the range and verify it; None if the runtime does not lock it.

    ``register`` and ``unregister`` return the runtime's code, 0 for success, and leave no error
    pending. Fault the pages in beforehand: the runtime does so one by one.

    Raises:
        PlatformError: Registered without effect, and then not to be unregistered.
    """
    if not 0 < nbytes <= MAX_LOCKED_BYTES:
        return None
    code = register()
    if code != 0:
        logger.info(
            "Platform %r does not page-lock %d bytes of host memory (code %d); copies go through "
            "a staging buffer, or block.",
            platform,
            nbytes,
            code,
        )
        return None
    locked = LockedMapping(platform, address, unregister)
    # Some drivers answer success and lock nothing.
    if not _is_pinned(address, nbytes):
        locked.close()
        return None
    return locked


def clear_pending_error(library: str, function: str) -> None:
    """Call ``function`` (as in ``cudaGetLastError``) in each mapped copy of ``library``.

    A failed call of a runtime leaves its error with the calling thread, and the next call there,
    however unrelated, raises it. torch has no way to clear it, and a fresh ``dlopen`` could load
    a second copy of the runtime, so the copies are found in ``/proc/self/maps``.
    """
    for path in _mapped_files(library):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            getattr(runtime, function)()
        except (OSError, AttributeError):  # replaced on disk since, or another library's name
            logger.debug("can't call %s in %s", function, path, exc_info=True)


def _is_pinned(address: int, nbytes: int) -> bool:
    import torch

    alias = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return alias.is_pinned() and alias[-1:].is_pinned()


def _mapped_files(library: str) -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    # address, permissions, offset, device, inode, path
    fields = (line.split(maxsplit=5) for line in lines)
    paths = {field[5].removesuffix(" (deleted)") for field in fields if len(field) == 6}
    return sorted(path for path in paths if os.path.basename(path).startswith(library))
