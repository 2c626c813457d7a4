"""What a measured forward does: how long it takes, of what kind it is, what it puts out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from sidestream.request import DiffusionRequest, SamplingParams

#: ``compute``: matrix products. ``memory``: passes over a buffer that no cache holds. ``launch``:
#: kernels so small that the host, which launches them, is the limit.
Kind = Literal["compute", "memory", "launch"]

#: By the name that the command line takes: shape and dtype of one output.
OUTPUTS: Final[dict[str, tuple[tuple[int, ...], str]]] = {
    "64px": ((1, 64, 64, 3), "uint8"),
    "512px": ((1, 512, 512, 3), "uint8"),
    "1024px": ((1, 1024, 1024, 3), "uint8"),
    "2048px": ((1, 2048, 2048, 3), "uint8"),
    "4x1024px": ((4, 1024, 1024, 3), "uint8"),
    "1024px-float32": ((1, 3, 1024, 1024), "float32"),
    "4x1024px-float32": ((4, 3, 1024, 1024), "float32"),
    "81x720p": ((81, 720, 1280, 3), "uint8"),
    "81x720p-bfloat16": ((81, 3, 720, 1280), "bfloat16"),
}
_ITEM_BYTES: Final = {"uint8": 1, "bfloat16": 2, "float32": 4}

#: An output's elements are all its request's number modulo this, which every dtype here holds.
_FILLS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of request; travels as the prompt."""

    output: str = "1024px"
    forward_s: float = 0.02
    kind: Kind = "compute"
    #: False: the output is made on the device and dropped there.
    keeps: bool = True
    #: Whether the forward waits for the device at its end, as many real ones do.
    waits: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Give the output's shape."""
        return OUTPUTS[self.output][0]

    @property
    def dtype(self) -> str:
        """Give the output's dtype by name."""
        return OUTPUTS[self.output][1]

    @property
    def nbytes(self) -> int:
        """Give the output's bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def pixels(self) -> int:
        """Give how many values are in the output, three a pixel."""
        return math.prod(self.shape)

    def without_output(self) -> Workload:
        """Give the same forward with its output dropped on the device."""
        return dataclasses.replace(self, keeps=False)

    def requests(self, count: int) -> Iterator[DiffusionRequest]:
        """Give requests number 0 to ``count - 1``; they may share forwards."""
        return map(self.request, range(count))

    def request(self, number: int) -> DiffusionRequest:
        """Give one request."""
        prompt = json.dumps(dataclasses.asdict(self))
        return DiffusionRequest(prompt, SamplingParams(seed=number), request_id=str(number))

    @classmethod
    def of(cls, request: DiffusionRequest) -> Workload:
        """Read it off a request."""
        return cls(**json.loads(request.prompt))


def fill_of(number: int) -> int:
    """Give the value of every element in the output of request ``number``."""
    return number % _FILLS
