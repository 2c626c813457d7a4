"""Where the host would wait for a CUDA device, seen on the simulated one.

The simulated device is asynchronous and waits where CUDA does, but keeps no list of it. CUDA
waits for the stream after every copy that is not ``non_blocking``, in either direction, and to
know a value or a shape that depends on one. This counts such calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sidestream.models.any_diffusers import AnyDiffusers
from sidestream.models.helios import Helios
from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.models.hunyuan_image3_checkpoint import build_hunyuan_image_3
from sidestream.models.post_process import find_post_process
from sidestream.models.qwen_image import QwenImage
from sidestream.models.video import LTX, Wan
from sidestream.models.video_checkpoint import build_video_pipeline
from sidestream.request import DiffusionRequest, SamplingParams

from . import tiny_pipelines

_aten = torch.ops.aten
#: Their results have shapes or values that only the device knows.
_ANSWERS = {
    _aten._local_scalar_dense.default: "value read",
    _aten.is_nonzero.default: "value read",
    _aten.equal.default: "value read",
    _aten.nonzero.default: "shape read",
    _aten.masked_select.default: "shape read",
    _aten._unique2.default: "shape read",
    _aten.unique_consecutive.default: "shape read",
    _aten.repeat_interleave.Tensor: "shape read",
}
_BETWEEN = ("/torch/", "/accelerate/", "/sidestream/testing/", "/quiet_scheduler.py")
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


@dataclass(frozen=True)
class Wait:
    """One call that would wait: what for, and the line of a library or of ours that asked."""

    what: str
    file: str
    line: int


class HostWaits:
    """Notes the waits of its block; ``take`` gives those since it was called before."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._waits: list[Wait] = []
        self._modes = ExitStack()

    def take(self) -> list[Wait]:
        waits, self._waits = self._waits, []
        return waits

    def __enter__(self) -> HostWaits:
        self._modes.enter_context(_Constructors(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def note(self, what: str) -> None:
        self._waits.append(Wait(what, *_caller()))

    def is_there(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._device_type


class _Operators(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        what = self._wait_of(func, args, kwargs, result)
        if what is not None:
            self._waits.note(what)
        return result

    def _wait_of(self, func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
        if func in _ANSWERS:
            return _ANSWERS[func] if self._waits.is_there(args[0]) else None
        if func in (_aten._to_copy.default, _aten.copy_.default):
            source = args[0] if func is _aten._to_copy.default else args[1]
            blocks = not (kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:]))
            if self._waits.is_there(source) != self._waits.is_there(result) and blocks:
                return "copy to the host" if self._waits.is_there(source) else "copy to the device"
        if func in _INDEXING and self._waits.is_there(args[0]):
            indices = [index for index in tree_leaves(args[1]) if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                return "shape read"
            if any(index.ndim and not self._waits.is_there(index) for index in indices):
                return "copy to the device"
        return None


class _Constructors(TorchFunctionMode):
    """``torch.tensor`` copies, and reads, where no operator shows it."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            for leaf in tree_leaves(args[0]):
                if self._waits.is_there(leaf):
                    self._waits.note("value read")
            result = func(*args, **kwargs)
            if self._waits.is_there(result) and result.numel():
                self._waits.note("copy to the device")
            return result
        return func(*args, **kwargs)


def _caller() -> tuple[str, int]:
    """Find the innermost line that is neither torch's nor of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not any(part in name for part in _BETWEEN):
            return Path(name).name, frame.f_lineno
        frame = frame.f_back
    return "?", 0


_VIDEO = {"height": 32, "width": 32}
#: Adapter, a small pipeline of it, and what a request asks beside the usual.
PIPELINES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "Qwen-Image": (
        QwenImage,
        tiny_pipelines.qwen_image,
        {"true_cfg_scale": 4.0, "negative_prompt": " "},
    ),
    "HunyuanImage-3.0 (architecture class)": (
        HunyuanImage3,
        lambda: build_hunyuan_image_3(tiny_pipelines.qwen_image().tokenizer, seed=0),
        {"guidance_scale": 5.0},
    ),
    "Flux": (AnyDiffusers, tiny_pipelines.flux, {}),
    "Stable Diffusion 3": (AnyDiffusers, tiny_pipelines.stable_diffusion_3, {}),
    "Z-Image": (AnyDiffusers, tiny_pipelines.z_image, {}),
    "Wan 2.1": (Wan, lambda: build_video_pipeline("wan", seed=0), {**_VIDEO, "num_frames": 5}),
    "Wan 2.2": (
        Wan,
        lambda: build_video_pipeline("wan", seed=0, two_experts=True),
        {**_VIDEO, "num_frames": 5},
    ),
    "LTX": (LTX, lambda: build_video_pipeline("ltx", seed=0), {**_VIDEO, "num_frames": 9}),
    "Helios, one chunk": (
        Helios,
        lambda: build_video_pipeline("helios", seed=0),
        {
            **_VIDEO,
            "num_frames": 5,
            "extra": {"num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]},
        },
    ),
}


@dataclass(frozen=True)
class Waits:
    """The waits of one request: before the first forward of its denoiser, step by step, after."""

    before: list[Wait]
    steps: list[list[Wait]]
    after: list[Wait]


def measure(adapter: Any, request: DiffusionRequest) -> Waits:
    """Sample ``request`` twice, and note the waits of the second time, up to the hand-over."""
    _finish(adapter, request)
    parts: list[list[Wait]] = []
    with (
        HostWaits(adapter.pipeline.device.type) as waits,
        _at_first_forward(adapter.pipeline.transformer, lambda: parts.append(waits.take())),
    ):
        adapter.on_step = lambda _step: parts.append(waits.take())
        try:
            _finish(adapter, request)
        finally:
            adapter.on_step = None
        after = waits.take()
    return Waits(parts[0], parts[1:], after)


def build(name: str, device: torch.device) -> tuple[Any, DiffusionRequest]:
    """Build a small adapter of :data:`PIPELINES` on a device, and a request for it."""
    adapter_class, build_pipeline, changed = PIPELINES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = build_pipeline().to(device)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    params = {"height": 64, "width": 64, "num_inference_steps": 3, "seed": 1, **changed}
    return adapter_class(pipeline), DiffusionRequest("a cat", SamplingParams(**params))


def table(measured: Mapping[str, Waits]) -> str:
    """Write the table of docs/models.md."""
    lines = [
        "| pipeline | before the first step | in a step | which | from there to the hand-over |",
        "|---|---|---|---|---|",
    ]
    for name, waits in measured.items():
        each = sorted({len(step) for step in waits.steps})
        in_a_step = str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}"
        which = sorted({f"{wait.what}, `{wait.file}`" for step in waits.steps for wait in step})
        cells = (name, len(waits.before), in_a_step, "; ".join(which) or "-", len(waits.after))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _finish(adapter: Any, request: DiffusionRequest) -> Any:
    """Do all that a worker does up to the hand-over."""
    (payload,) = adapter.forward([request])
    found = find_post_process(adapter)
    assert found is not None
    return found[1].device(payload, request.sampling_params)


@contextmanager
def _at_first_forward(module: torch.nn.Module, act: Any) -> Iterator[None]:
    acted = []

    def once(*_: Any) -> None:
        if not acted:
            acted.append(True)
            act()

    hook = module.register_forward_pre_hook(once)
    try:
        yield
    finally:
        hook.remove()
