"""PNG files of outputs, encoded away from the loop that takes the outputs.

An encoder needs tens of milliseconds for a large image. In the loop that would hold the next
output's memory back, and with it the device.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL.Image import Image

    from sidestream.output import DiffusionOutput

_MAX_THREADS: Final = 4


def write_png(path: Path, image: Image, text: Mapping[str, str], *, overwrite: bool) -> None:
    """Write ``image`` with ``text`` as its metadata, in Latin-1 or, where that fails, UTF-8.

    Raises:
        FileExistsError: The file is there and ``overwrite`` is False.
    """
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    for key, value in text.items():
        metadata.add_text(key, value)
    encoded = io.BytesIO()
    image.save(encoded, format="png", pnginfo=metadata)
    with path.open("wb" if overwrite else "xb") as file:  # complete or not there at all
        file.write(encoded.getbuffer())


class PngWriter:
    """Write outputs into a folder on a few threads.

    Open until :meth:`close`, or the end of a ``with`` block. Used by one thread.
    """

    def __init__(self, folder: Path, *, overwrite: bool = False) -> None:
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._folder = folder
        self._overwrite = overwrite
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="png")
        # Bounds the outputs that wait for an encoder, whose memory is not free meanwhile.
        self._room = threading.BoundedSemaphore(2 * threads)
        self._writes: list[Future[list[Path]]] = []

    def submit(self, output: DiffusionOutput, name: str, text: Mapping[str, str]) -> None:
        """Queue an output; its images become ``name.png``, or ``name_0.png`` and so on.

        ``text["seed"]`` is the first image's; those after it count on. Waits only while every
        encoder is two outputs behind.
        """
        self._room.acquire()
        write = self._pool.submit(self._write, output, name, text)
        write.add_done_callback(lambda _: self._room.release())
        self._writes.append(write)

    @property
    def files(self) -> list[Path]:
        """Give the files that were written, in the order of their outputs."""
        done = (write for write in self._writes if write.done() and write.exception() is None)
        return [path for write in done for path in write.result()]

    def _write(self, output: DiffusionOutput, name: str, text: Mapping[str, str]) -> list[Path]:
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

    def __enter__(self) -> PngWriter:
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
