"""Pipelines that give back what they are told to, and the payloads that they are told to make."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import resource
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils import _pytree as pytree

from sidestream import (
    DiffusionEngine,
    DiffusionOutput,
    DiffusionRequest,
    EngineConfig,
    SamplingParams,
)

MIB = 1 << 20

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


class Courier:
    """Answers with the inputs, with one of ``PAYLOADS``, or with bytes of a given size."""

    outputs_are_private = True

    @classmethod
    def load(cls, config):
        self = cls()
        self.device = config.device
        return self

    def forward(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        order, _, name = request.prompt.partition(" ")
        match order:
            case "echo":
                return request.inputs["tree"]
            case "echo-by-device":
                return pytree.tree_map_only(
                    torch.Tensor, lambda leaf: leaf.to(self.device), request.inputs["tree"]
                )
            case "make":
                return PAYLOADS[name](self.device)
            case "make-unpackable":
                culprit = UNPACKABLE[name](self.device)
                return {"frames": [torch.ones(MIB, device=self.device), Decoded((culprit,))]}
            case "make-refusing":
                return [torch.ones(MIB, device=self.device), Refusing()]
            case "fill":
                return torch.full(
                    (int(name),),
                    request.sampling_params.seed % 251,
                    dtype=torch.uint8,
                    device=self.device,
                )
            case "kept":
                return self.kept
            case "die-once":
                if not Path(name).exists():
                    Path(name).touch()
                    os._exit(3)
                return torch.ones(MIB, dtype=torch.uint8, device=self.device)
            case "text":
                return {"image": torch.ones(64, 64, device=self.device), "text": "x" * int(name)}

    # --- calls ------------------------------------------------------------------------------------

    def keep(self, nbytes):
        """Make the tensor that "kept" answers with, before memory is limited."""
        self.kept = torch.ones(nbytes, dtype=torch.uint8, device=self.device)

    def limit(self, name, spare_bytes):
        """Let this process take no more than ``spare_bytes`` of memory."""
        limit_memory(name, spare_bytes)

    def pid(self):
        return os.getpid()

    def text(self, nbytes):
        return "x" * nbytes

    def holdings(self):
        """Count descriptors and mapped memfds of this process."""
        maps = Path("/proc/self/maps").read_text().count("/memfd:sidestream")
        return len(os.listdir("/proc/self/fd")), maps

    def copied_bytes(self):
        from sidestream.testing import sim

        nbytes = [copy.nbytes for copy in sim.copies() if copy.stream is not None]
        sim.clear_copies()
        return nbytes


class Borrower(Courier):
    """Lends out its one tensor, and writes to it in the next forward."""

    outputs_are_private = False

    def answer(self, request):
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(256, 256, dtype=torch.uint8, device=self.device)
        self.buffer.fill_(request.sampling_params.seed % 251)
        return self.buffer


# --- for tests and their scripts ------------------------------------------------------------------


def start(platform: str = "cpu", executor: str = "multiproc", **config) -> DiffusionEngine:
    """Start an engine whose pipeline is a ``Courier``."""
    config.setdefault("pipeline", "payload_pipes:Courier")
    return DiffusionEngine(EngineConfig(platform=platform, executor=executor, **config))


def fill(nbytes: int, seed: int = 0) -> DiffusionRequest:
    """Ask for bytes that are all ``seed % 251``."""
    return DiffusionRequest(f"fill {nbytes}", SamplingParams(seed=seed))


def is_filled(output: DiffusionOutput, nbytes: int, seed: int = 0) -> bool:
    """Tell whether this is what ``fill`` asked for."""
    return output.output.shape == (nbytes,) and bool((output.output == seed % 251).all())


def settle(engine: DiffusionEngine) -> None:
    """Wait until the slots of outputs that were dropped are back at the worker."""
    gc.collect()
    # The thread that brings the first answer has sent back what died before it takes the second.
    for _ in range(2):
        engine.executor.collective_rpc("ping")


def limit_memory(name: str, spare_bytes: int | None) -> None:
    """Limit this process by ``RLIMIT_<name>`` to what it has and a little more; None: lift it."""
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    used = memory_of(os.getpid(), {"AS": "VmSize", "DATA": "VmData"}[name])
    resource.setrlimit(which, (hard if spare_bytes is None else used + spare_bytes, hard))


def memory_of(pid: int, field: str = "VmRSS") -> int:
    """Read one of a process's sizes in bytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


class NoNamespace(Exception):
    """This process may not mount anything, not even for itself."""


def mount_for_myself(*places: str, size: str = "8m") -> None:
    """Mount an empty tmpfs over each place, for this process and those that it starts.

    Raises:
        NoNamespace: The system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        raise NoNamespace(f"unshare: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    calls = [("none", "/", None, _MS_REC | _MS_PRIVATE, None)]
    calls += [("none", place, "tmpfs", 0, f"size={size}") for place in places]
    for call in calls:
        encoded = [part.encode() if isinstance(part, str) else part for part in call]
        if libc.mount(*encoded[:3], ctypes.c_ulong(encoded[3]), encoded[4]):
            raise NoNamespace(f"mount over {call[1]}: {os.strerror(ctypes.get_errno())}")


# --- payloads -------------------------------------------------------------------------------------

Size = namedtuple("Size", "width height")


@dataclasses.dataclass
class Decoded:
    frames: Any
    fps: float = 24.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any


class Marked(torch.Tensor):
    """A tensor with something said about it."""


class Refusing:
    """Leaves, and will not arrive."""

    def __getstate__(self):
        return {"reason": 1}

    def __setstate__(self, state):
        raise ValueError("this class has had enough")


def _raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of any bits, those of NaNs included."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(count).integers(
        0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8
    )
    return torch.from_numpy(raw).view(dtype).view(shape)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def _nested(depth: int, leaf: Any) -> Any:
    for level in range(depth):
        leaf = [{"level": level, "deeper": (leaf, None)}]
    return leaf


def image(mode: str) -> Image.Image:
    """Make a PIL image with something to see in each channel."""
    noise = np.random.default_rng(len(mode)).integers(0, 256, (40, 30, 4), dtype=np.uint8)
    match mode:
        case "1":
            return Image.fromarray(noise[..., 0]).convert("1")
        case "I" | "I;16" | "F":
            dtype = {"I": np.int32, "I;16": np.uint16, "F": np.float32}[mode]
            made = Image.fromarray((noise[..., 0].astype(np.int64) * 257).astype(dtype))
            assert made.mode == mode
            return made
        case "P" | "PA":
            made = Image.fromarray(noise[..., 0]).convert(mode)
            made.putpalette(noise[:20, :10].tobytes(), "RGBA")
            return made
        case _:
            return Image.frombytes(mode, (30, 40), noise.tobytes()[: 1200 * len(_bands(mode))])


def _bands(mode: str) -> tuple[str, ...]:
    return Image.new(mode, (1, 1)).getbands()


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]

MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"]

#: What each makes on a device is what it makes on the CPU.
PAYLOADS = {
    **{f"{dtype}": lambda dev, d=dtype: _raw(d, 5, 7).to(dev) for dtype in DTYPES},
    **{f"image-{mode}": lambda _dev, m=mode: image(m) for mode in MODES},
    "conjugate": lambda dev: _raw(torch.int32, 6, 4).float().view(torch.complex64).to(dev).conj(),
    "negative": lambda dev: _numbers(6, 4).view(torch.complex64).to(dev).conj().imag,
    "no-dimensions": lambda dev: torch.tensor(3.5).to(dev),
    "empty": lambda dev: torch.empty(0, 3, 8, device=dev),
    "empty-view-of-a-large-one": lambda dev: torch.ones(MIB, device=dev)[:0],
    "small-view-of-a-large-one": lambda dev: torch.ones(MIB, device=dev)[7:10],
    "transposed": lambda dev: _numbers(6, 4).to(dev).t(),
    "channels-last": lambda dev: _numbers(1, 3, 4, 5).to(dev).to(memory_format=torch.channels_last),
    "strided": lambda dev: _numbers(8, 9).to(dev)[1::2, ::3],
    "expanded": lambda dev: _numbers(1, 5).to(dev).expand(4, 5),
    "eight-bytes": lambda dev: torch.tensor([1.0]).double().to(dev),
    "many-small": lambda dev: [_numbers(i).to(dev) for i in range(40)],
    "same-twice": lambda dev: [_numbers(9).to(dev)] * 2,
    "parameter": lambda _dev: torch.nn.Parameter(_numbers(3), requires_grad=True),
    "subclass": lambda _dev: _numbers(3).as_subclass(Marked),
    "reversed-array": lambda _dev: np.arange(12, dtype=">i2").reshape(3, 4)[::-1, ::-2],
    "array-of-objects": lambda _dev: np.array([None, "a", {"b": 1}, 2.5], dtype=object),
    "array-of-records": lambda _dev: np.array([(1, 2.5)], dtype=[("a", "i1"), ("b", "f8")]),
    "array-of-dates": lambda _dev: np.array(["2026-11-30"], dtype="M8[D]"),
    "numpy-number": lambda _dev: np.float32(1.5),
    "namedtuple": lambda dev: Size(_numbers(3).to(dev), None),
    "dataclass": lambda dev: Decoded([_numbers(3).to(dev)], fps=25),
    "frozen-dataclass": lambda dev: Frozen(_numbers(3).to(dev)),
    "ordered-dict": lambda dev: OrderedDict(b=_numbers(3).to(dev), a=None),
    "like-a-marker": lambda _dev: {
        "__tensor__": True,
        "dtype": "float32",
        "offset": 0,
        ("pid", 0): (0, 0, 0, 256, ("float32", (64,), None, None, False, None)),
    },
    "bytes": lambda _dev: [b"", b"short", bytes(range(256)) * 100, bytearray(b"x" * 20_000)],
    "none-inside": lambda _dev: [None, {"a": None}, (None,)],
    "ten-deep": lambda dev: _nested(10, _numbers(5).to(dev)),
    "mixed": lambda dev: {
        "frames": [_numbers(2, 3).to(dev), image("RGB")],
        "audio": np.zeros((2, 5), dtype=np.int16),
        "text": "two\0lines\n" * 3,
        "numbers": (1, 2.5, 3 + 4j, True, 1 << 100, float("inf")),
        "set": {1, "a"},
    },
}

#: What has no bytes that could travel, or refuses to.
UNPACKABLE = {
    "lock": lambda _dev: threading.Lock(),
    "lambda": lambda _dev: lambda: 0,
    "sparse tensor": lambda _dev: torch.ones(3).to_sparse(),
    "meta tensor": lambda _dev: torch.ones(3, device="meta"),
    "lock in an array": lambda _dev: np.array([1, threading.Lock()], dtype=object),
}
