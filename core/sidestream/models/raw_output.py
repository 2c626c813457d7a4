"""Let a diffusers pipeline end with its decoder's tensor: on the device and not waited for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: The ``output_type`` of a pipeline that :func:`leave_raw` was called with.
RAW: Final = "raw"


def leave_raw(pipeline: Any, output_type: str = RAW) -> None:
    """Make ``output_type`` mean the decoder's tensor; the other types stay what they are.

    A pipeline that checks the type before it starts needs one that it knows.
    """
    for processor in processors(pipeline):
        for method in ("postprocess", "postprocess_video"):
            own = getattr(processor, method, None)
            if own is not None:
                setattr(processor, method, _raw_if(output_type, own))


def processors(pipeline: Any) -> list[Any]:
    """Give what a pipeline makes images or videos of its decoder's tensors with."""
    found = [getattr(pipeline, f"{kind}_processor", None) for kind in ("image", "video")]
    return [processor for processor in found if processor is not None]


def _raw_if(raw_type: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def postprocess(decoded: Any, *args: Any, **kwargs: Any) -> Any:
        asked_for = args[0] if args else kwargs.get("output_type")
        return decoded if asked_for == raw_type else own(decoded, *args, **kwargs)

    return postprocess
