"""What comes out of an engine."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sidestream.models.post_process import is_video, to_images
from sidestream.request import OutputTimings
from sidestream.transport.packing import detach_copy

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(eq=False)
class DiffusionOutput:
    """What one request produced, on the host.

    ``output`` is the tree that the pipeline returned, after post-processing: tensors and arrays
    alias memory that is this output's alone until the last of them is gone; a forked child shares
    it, so that what either process writes both see. Keep results for long with :meth:`detach_copy`,
    which gives the shared memory back.
    """

    #: The caller's id, or the engine's if the caller gave none.
    request_id: str
    output: Any
    async_output_id: str | None = None
    timings: OutputTimings = field(default_factory=OutputTimings)
    #: Key of the host half of post-processing, see ``sidestream.models.post_process``.
    post_process: str | None = None

    @property
    def images(self) -> list[Image]:
        """Make PIL images of the output; the work is done here, in the caller's thread.

        Raises:
            MissingDependencyError: Pillow is not installed.
            TypeError: The output is no image.
        """
        return to_images(self.output, self.post_process)

    @property
    def frames(self) -> list[Image]:
        """Make PIL images of a video's frames, in order; otherwise as :attr:`images`."""
        return self.images

    @property
    def is_video(self) -> bool:
        """Whether the images are the frames of one video."""
        return is_video(self.post_process)

    def detach_copy(self) -> DiffusionOutput:
        """Copy the tensors and arrays out of shared memory, so that their slot is free again."""
        return dataclasses.replace(self, output=detach_copy(self.output))


class EventKind(enum.StrEnum):
    """What a :class:`RequestEvent` tells of."""

    #: A denoising step is queued on the device.
    STEP = "step"
    #: A part of the output is decoded and readable, such as some frames of a video.
    CHUNK = "chunk"
    #: The last of a request's work is queued on the device.
    COMPUTE_DONE = "compute-done"
    #: The output is readable; the last event.
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestEvent:
    """Something that happened to a request under way, see ``RequestHandle.events``."""

    kind: EventKind
    #: Steps done, and how many there are in all; in step mode.
    step: int | None = None
    num_steps: int | None = None
    #: The part's number, from 0.
    chunk: int | None = None
    #: The part, or the whole: its ``frames`` are what is new.
    output: DiffusionOutput | None = None
