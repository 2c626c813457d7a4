"""Files of outputs, encoded away from the loop that takes the outputs.

An encoder needs tens of milliseconds for a large image. In the loop that would hold the next
output's memory back, and with it the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from sidestream.cli.png import write_png
from sidestream.cli.video import VideoFile, open_video

if TYPE_CHECKING:
    from sidestream.output import DiffusionOutput

_MAX_THREADS: Final = 4


class OutputWriter:
    """Write outputs into a folder on a few threads.

    Open until :meth:`close`, or the end of a ``with`` block. Used by one thread.
    """

    def __init__(self, folder: Path, *, fps: int = 24, overwrite: bool = False) -> None:
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._folder = folder
        self._fps = fps
        self._overwrite = overwrite
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        # Bounds the outputs that wait for an encoder, whose memory is not free meanwhile.
        self._room = threading.BoundedSemaphore(2 * threads)
        self._writes: list[Future[list[Path]]] = []
        #: How many videos are among the outputs.
        self.videos = 0

    def submit(self, output: DiffusionOutput, name: str, text: Mapping[str, str]) -> None:
        """Queue an output; its images become ``name.png``, or ``name_0.png`` and so on.

        A video becomes ``name.mp4``, or a folder ``name`` of its frames. ``text["seed"]`` is the
        first image's; those after it count on. Waits only while every encoder is two outputs
        behind.
        """
        self.videos += output.is_video
        self._room.acquire()
        write = self._pool.submit(self._write, output, name, text)
        write.add_done_callback(lambda _: self._room.release())
        self._writes.append(write)

    def open_video(self, name: str, text: Mapping[str, str]) -> VideoFile:
        """Begin a video that comes in parts, written by the caller's thread."""
        return open_video(self._folder, name, text, fps=self._fps, overwrite=self._overwrite)

    def record(self, video: VideoFile) -> None:
        """Count a video that came in parts among the outputs."""
        self.videos += 1
        written: Future[list[Path]] = Future()
        written.set_result(video.files)
        self._writes.append(written)

    @property
    def files(self) -> list[Path]:
        """Give the files that were written, in the order of their outputs."""
        return [path for write in self._done() for path in write.result()]

    @property
    def count(self) -> int:
        """Count the outputs that were written."""
        return len(self._done())

    def _done(self) -> list[Future[list[Path]]]:
        return [write for write in self._writes if write.done() and write.exception() is None]

    def _write(self, output: DiffusionOutput, name: str, text: Mapping[str, str]) -> list[Path]:
        if output.is_video:
            with self.open_video(name, text) as video:
                video.append(output.frames)
            return video.files
        images = output.images
        lone = len(images) == 1
        paths = [
            self._folder / (f"{name}.png" if lone else f"{name}_{index}.png")
            for index in range(len(images))
        ]
        for index, (path, image) in enumerate(zip(paths, images, strict=True)):
            seed = {"seed": str(int(text["seed"]) + index)}
            write_png(path, image, {**text, **seed}, overwrite=self._overwrite)
        return paths

    def close(self) -> None:
        """Wait for every file, then raise the first error that one of them met."""
        self._pool.shutdown(wait=True)
        for write in self._writes:
            write.result()

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._pool.shutdown(wait=True)  # an error of a file would hide this one
