"""Let a diffusers pipeline end with its decoder's tensor, -1 to 1, and not wait for the device."""

from __future__ import annotations

from typing import Any, Final

from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor

#: The ``output_type`` of a pipeline that :func:`leave_raw` was called with.
RAW: Final = "raw"


class _RawImages(VaeImageProcessor):  # type: ignore[misc]
    def postprocess(self, image: Any, output_type: str = "pil", *args: Any, **kwargs: Any) -> Any:
        return (
            image
            if output_type == RAW
            else super().postprocess(image, output_type, *args, **kwargs)
        )


class _RawVideos(VideoProcessor):  # type: ignore[misc]
    def postprocess_video(self, video: Any, output_type: str = "np", **kwargs: Any) -> Any:
        return (
            video if output_type == RAW else super().postprocess_video(video, output_type, **kwargs)
        )


def leave_raw(pipeline: Any) -> None:
    """Make ``output_type="raw"`` known to ``pipeline``; the other types stay what they are."""
    for name, own, raw in (
        ("image_processor", VaeImageProcessor, _RawImages),
        ("video_processor", VideoProcessor, _RawVideos),
    ):
        processor: Any = getattr(pipeline, name, None)
        if type(processor) is own:
            setattr(pipeline, name, raw.from_config(processor.config))
