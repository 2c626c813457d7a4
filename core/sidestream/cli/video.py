"""Files of videos: MP4 where PyAV is installed, else a folder with a PNG file for each frame."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from sidestream.cli.png import write_png

if TYPE_CHECKING:
    from PIL.Image import Image

#: How the players get to see frames before the file is complete: each is a fragment of its own.
_WHILE_WRITTEN: Final = {"movflags": "frag_every_frame+empty_moov+default_base_moof"}
_X264: Final = "libx264"
# Hardly visible losses; and no frame is kept back to see what comes behind it.
_X264_OPTIONS: Final = {"crf": "16", "preset": "veryfast", "tune": "zerolatency"}


def makes_mp4() -> bool:
    """Tell whether videos become MP4 files."""
    return importlib.util.find_spec("av") is not None


class VideoFile(Protocol):
    """A video on its way to the disk: ``with`` it, and append the frames as they come."""

    @property
    def files(self) -> list[Path]:
        """What was written."""
        ...

    def append(self, frames: Sequence[Image]) -> None:
        """Write the next frames; they can be looked at when this returns."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def open_video(
    folder: Path, name: str, text: Mapping[str, str], *, fps: int, overwrite: bool
) -> VideoFile:
    """Begin ``name.mp4`` with ``fps`` frames a second, or the folder ``name`` with PNG files.

    Raises:
        FileExistsError: It is there and ``overwrite`` is False.
    """
    if makes_mp4():
        return Mp4File(folder / f"{name}.mp4", text, fps=fps, overwrite=overwrite)
    return FrameFolder(folder / name, text, overwrite=overwrite)


class Mp4File:
    """An MP4 file that can be played while it is written. Used by one thread."""

    def __init__(self, path: Path, text: Mapping[str, str], *, fps: int, overwrite: bool) -> None:
        import av

        self._path = path
        self._text = text
        self._fps = fps
        # Unbuffered: whoever looks sees all that was appended.
        self._file = path.open("wb" if overwrite else "xb", buffering=0)
        self._container: Any = av.open(self._file, "w", format="mp4", options=_WHILE_WRITTEN)
        self._stream: Any = None

    @property
    def files(self) -> list[Path]:
        """Give the file."""
        return [self._path]

    def append(self, frames: Sequence[Image]) -> None:
        """Encode the next frames; the first one's size is the video's."""
        import av
        import numpy as np

        for image in frames:
            pixels = np.asarray(image.convert("RGB"))
            if self._stream is None:
                self._stream = self._begin(*pixels.shape[:2])
            self._container.mux(
                self._stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
            )

    def _begin(self, height: int, width: int) -> Any:
        import av

        # Builds of FFmpeg without x264 have the older encoder.
        has_x264 = _X264 in av.codecs_available
        stream: Any = self._container.add_stream(_X264 if has_x264 else "mpeg4", rate=self._fps)
        stream.height, stream.width = height, width
        # Colors at half the resolution, which every player knows, need even sizes.
        stream.pix_fmt = "yuv444p" if has_x264 and (height % 2 or width % 2) else "yuv420p"
        if has_x264:
            stream.options = _X264_OPTIONS
        details = ", ".join(f"{key}: {value}" for key, value in self._text.items())
        self._container.metadata.update(title=self._text.get("prompt", ""), comment=details)
        return stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if self._stream is not None:
                self._container.mux(self._stream.encode())  # what the encoder kept
            self._container.close()
        if self._stream is None:
            self._path.unlink()  # no frame: no video


class FrameFolder:
    """A folder with a PNG file for each frame. Used by one thread."""

    def __init__(self, folder: Path, text: Mapping[str, str], *, overwrite: bool) -> None:
        folder.mkdir(exist_ok=overwrite)
        self._folder = folder
        self._text = text
        self._overwrite = overwrite
        self._files: list[Path] = []

    @property
    def files(self) -> list[Path]:
        """Give the frames' files, in order."""
        return self._files

    def append(self, frames: Sequence[Image]) -> None:
        """Write the next frames."""
        for image in frames:
            path = self._folder / f"{len(self._files):05d}.png"
            write_png(path, image, self._text, overwrite=self._overwrite)
            self._files.append(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is open."""
