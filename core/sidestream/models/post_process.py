"""Post-processing in two halves, by pipeline class.

The device half turns a pipeline's raw payload into what is worth copying; it runs on the device
before the copy. The host half makes PIL images; it runs in the caller's thread, when asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sidestream.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from PIL.Image import Image
    from torch import Tensor

    from sidestream.request import SamplingParams

#: Device memory that the conversion to uint8 uses beside its input and its result.
_WORKSPACE_BYTES: Final = 64 << 20
# One value on its way: in the decoder's dtype (4 bytes at most), as float32, as uint8 where a
# backend makes a contiguous copy before it changes the layout.
_WORKSPACE_BYTES_PER_VALUE: Final = 4 + 4 + 1


@dataclass(frozen=True)
class PostProcess:
    """The two halves for one kind of payload."""

    #: Payload and sampling parameters to the tree that is copied. Queues work on the current
    #: stream, never waits for it; the result never shares memory with the payload.
    device: Callable[[Any, SamplingParams], Any]
    #: That tree, on the host, to images.
    host: Callable[[Any], list[Image]]
    #: Whether these are the frames of one video.
    is_video: bool = False


def decoded_to_output(decoded: Any, params: SamplingParams) -> Tensor:
    """Bring a decoder's tensor (n,3,H,W), -1 to 1, into the form that ``output_type`` names.

    ``uint8`` (also for None): (n,H,W,3), the same bits as diffusers' ``output_type="pil"``;
    ``float``: (n,3,H,W), 0 to 1, in the decoder's dtype; ``latent``: a copy of what is there.
    """
    if params.output_type == "latent":
        return decoded.clone()  # type: ignore[no-any-return]
    if decoded.ndim != 4 or not decoded.is_floating_point():
        raise TypeError(
            f"An image decoder's tensor has the shape (n, 3, H, W) and a float dtype; got "
            f"{tuple(decoded.shape)}, {decoded.dtype}."
        )
    if params.output_type == "float":
        return _denormalize(decoded)
    return _to_uint8(decoded, _WORKSPACE_BYTES)


def decoded_to_frames(decoded: Any, params: SamplingParams) -> Tensor:
    """Bring a video decoder's tensor (1,3,frames,H,W), -1 to 1, into the form of ``output_type``.

    ``uint8`` (also for None): (frames,H,W,3); ``float``: (frames,3,H,W); otherwise as
    :func:`decoded_to_output`. Works for a part of the frames too.
    """
    if params.output_type == "latent":
        return decoded.clone()  # type: ignore[no-any-return]
    if decoded.ndim != 5 or decoded.shape[0] != 1:
        raise TypeError(
            "A video decoder's tensor has the shape (1, 3, frames, H, W); got "
            f"{tuple(decoded.shape)}."
        )
    return decoded_to_output(decoded[0].movedim(1, 0), params)


def decoded_nbytes(
    params: SamplingParams, dtype: torch.dtype, *, count: int, height: int, width: int
) -> int:
    """Give the bytes that either of these leaves of ``count`` images or frames in ``dtype``.

    Not for latents, whose shape is the model's own.
    """
    item_bytes = dtype.itemsize if params.output_type == "float" else 1
    return count * height * width * 3 * item_bytes


def _denormalize(decoded: Tensor) -> Tensor:
    # The operations, order and dtype of diffusers' VaeImageProcessor.denormalize.
    return (decoded * 0.5).add_(0.5).clamp_(0, 1)


def _to_uint8(decoded: Tensor, workspace_bytes: int) -> Tensor:
    import torch

    n, channels, height, width = decoded.shape
    result = torch.empty((n, height, width, channels), dtype=torch.uint8, device=decoded.device)
    row_bytes = channels * width * _WORKSPACE_BYTES_PER_VALUE
    for images, rows in _blocks(n, height, row_bytes, workspace_bytes):
        values = _denormalize(decoded[images, :, rows])
        values = values.float().mul_(255).round_()
        result[images, rows].copy_(values.movedim(1, -1))
    return result


def _blocks(
    n: int, height: int, row_bytes: int, workspace_bytes: int
) -> Iterator[tuple[slice, slice]]:
    """Cut n images into blocks of whole images, or of rows of one image if one is too large."""
    rows = max(1, workspace_bytes // max(1, row_bytes))
    images = max(1, rows // max(1, height))
    for first in range(0, n, images):
        for top in range(0, height, rows):
            yield slice(first, first + images), slice(top, top + rows)


def _output_to_images(output: Any) -> list[Image]:
    if getattr(output, "ndim", None) != 4:
        shape = tuple(output.shape) if hasattr(output, "shape") else type(output).__name__
        raise TypeError(
            f"There are no images in this output ({shape}): it holds latents, or was made by "
            "something else. Ask for output_type='uint8' or 'float', or read output.output."
        )
    return list(_images_in(output))


def get_hunyuan_image3_post_process_func() -> PostProcess:
    """Give HunyuanImage-3.0's halves: its pipelines end with the decoder's tensor.

    The released model's own code would make PIL images in the forward, and wait for the device.
    """
    return PostProcess(device=decoded_to_output, host=_output_to_images)


_VIDEO: Final = PostProcess(device=decoded_to_frames, host=_output_to_images, is_video=True)

#: By the name of a pipeline's class, or by what its attribute ``post_process`` says.
_DIFFUSION_POST_PROCESS_FUNCS: dict[str, PostProcess] = {
    "QwenImagePipeline": PostProcess(device=decoded_to_output, host=_output_to_images),
    "HunyuanImage3Pipeline": get_hunyuan_image3_post_process_func(),
    "HunyuanImage3ForCausalMM": get_hunyuan_image3_post_process_func(),
    "HeliosPipeline": _VIDEO,
    "WanPipeline": _VIDEO,
    "LTXPipeline": _VIDEO,
    # Any of diffusers that have no entry of their own.
    "DiffusionPipeline": PostProcess(device=decoded_to_output, host=_output_to_images),
    "DiffusionVideoPipeline": _VIDEO,
}


def find_post_process(pipeline: object) -> tuple[str, PostProcess] | None:
    """Find the key and the halves for a pipeline; None if its payloads go through untouched.

    Raises:
        ConfigError: The pipeline's ``post_process`` names a key that is not in the registry.
    """
    key = getattr(pipeline, "post_process", type(pipeline).__name__)
    if key in _DIFFUSION_POST_PROCESS_FUNCS:
        return key, _DIFFUSION_POST_PROCESS_FUNCS[key]
    if key is not None and hasattr(pipeline, "post_process"):
        known = ", ".join(map(repr, _DIFFUSION_POST_PROCESS_FUNCS))
        raise ConfigError(f"{type(pipeline).__name__}.post_process", key, f"{known}, or None")
    return None


def is_video(key: str | None) -> bool:
    """Tell whether outputs of ``key``, as ``find_post_process`` gave it, are frames of videos."""
    return key is not None and _DIFFUSION_POST_PROCESS_FUNCS[key].is_video


def to_images(tree: Any, key: str | None) -> list[Image]:
    """Make PIL images of an output on the host; ``key`` is what ``find_post_process`` gave.

    Without a key these work, alone or in lists: PIL images; uint8 tensors and arrays
    (n,H,W,C) or (H,W,C); float ones (n,C,H,W) or (C,H,W), 0 to 1. C is 1, 3 or 4.

    Raises:
        TypeError: The tree holds something that is no image.
        MissingDependencyError: Pillow is not installed.
    """
    if key is not None:
        return _DIFFUSION_POST_PROCESS_FUNCS[key].host(tree)
    return list(_images_in(tree))


def _images_in(tree: Any) -> Iterator[Image]:
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "making images", "pip install pillow") from error
    if isinstance(tree, PIL.Image.Image):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _images_in(branch)
    else:
        for pixels in _to_pixels(tree):
            gray = pixels.shape[-1] == 1
            yield PIL.Image.fromarray(np.ascontiguousarray(pixels[..., 0] if gray else pixels))


def _to_pixels(leaf: Any) -> np.ndarray:
    """Give uint8 pixels (n,H,W,C) of one tensor or array."""
    # Where torch is not imported, or still is by another thread, nothing is a tensor.
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    array = leaf
    if tensor_class is not None and isinstance(leaf, tensor_class):
        tensor = leaf.detach().cpu()
        array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(array, np.ndarray) and array.ndim in (3, 4):
        batch = array if array.ndim == 4 else array[None]
        if batch.dtype == np.uint8 and batch.shape[-1] in (1, 3, 4):
            return batch
        if np.issubdtype(batch.dtype, np.floating) and batch.shape[1] in (1, 3, 4):
            values = np.nan_to_num(batch.astype(np.float32)).clip(0, 1)
            return (np.moveaxis(values, 1, -1) * 255).round().astype(np.uint8)
    what = f"{leaf.dtype} of shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else repr(leaf)
    raise TypeError(
        f"Can't make images of {type(leaf).__name__} ({what:.200}). Images are PIL images, uint8 "
        "(n,H,W,C) or (H,W,C), or float 0 to 1 (n,C,H,W) or (C,H,W), with 1, 3 or 4 channels. "
        "Read output.output instead, or give the pipeline's class a post_process."
    )
