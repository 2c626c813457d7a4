"""Two ways in short blocks that take turns, compared block by block.

What else a machine does slows series of a second by 10 to 20 %, and both of two blocks that follow
each other within parts of a second about alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sidestream.bench.series import call, sample_of
from sidestream.bench.table import median
from sidestream.errors import InternalError

if TYPE_CHECKING:
    from sidestream.bench.pipelines import Forward
    from sidestream.bench.workload import Workload
    from sidestream.engine import DiffusionEngine

#: Forwards of a block. The first one counts for none: it runs beside the other way's last copy.
BLOCK: Final = 6
#: Blocks of a group, True for the first way's: one that is quicker where it comes first, or on a
#: machine that becomes slower, is so both ways.
ORDER: Final = (True, False, False, True)
Block = list["Forward"]
#: Resamples of an interval, and its share.
_RESAMPLES: Final = 2000
_CONFIDENCE: Final = 0.95
_FEWEST: Final = 6


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of some pairs' ratios, and the interval that holds it in 95 of 100 cases.

    Fewer than six pairs can't tell that much: the interval is their whole range then.
    """

    value: float
    low: float
    high: float
    pairs: int

    @property
    def interval(self) -> str:
        """Show the interval."""
        return f"{self.low:.4f}-{self.high:.4f}"


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Compare the first of each pair with the second.

    The interval is by bootstrap over the pairs, with the same resamples each time. Of no pairs all
    is nan.
    """
    ratios = np.array([first / second for first, second in pairs])
    if not pairs:
        return Ratio(value=float("nan"), low=float("nan"), high=float("nan"), pairs=0)
    value = median(ratios.tolist())
    if len(pairs) < _FEWEST:
        low, high = float(ratios.min()), float(ratios.max())
        return Ratio(value=value, low=low, high=high, pairs=len(pairs))
    chosen = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    edge = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.median(ratios[chosen], axis=1), (edge, 100 - edge))
    return Ratio(value=value, low=float(low), high=float(high), pairs=len(pairs))


def groups_in(seconds: float, forward_s: float) -> int:
    """Give how many groups of blocks take about that long; one at least."""
    return max(1, round(seconds / (len(ORDER) * BLOCK * forward_s)))


def run_blocks(
    engine: DiffusionEngine, first: Workload, second: Workload, groups: int
) -> list[tuple[list[Block], list[Block]]]:
    """Run both in one stream of requests without a pause; give each group's blocks, way by way.

    A block is its forwards and the first one behind it, which tells when its last one's time was
    over. One that is not counted runs in front, until the engine is in its stride.

    Raises:
        InternalError: An output is not its request's.
    """
    order = ORDER * groups
    stream = [first if is_first else second for is_first in order for _ in range(BLOCK)]
    stream = [second] * BLOCK + stream + [second]
    call(engine, "take_forwards")
    requests = (workload.request(number) for number, workload in enumerate(stream))
    for number, output in enumerate(engine.imap(requests)):
        sample_of(stream[number], output, number)
        del output  # its slot is free while the next one is waited for
    forwards: Block = call(engine, "take_forwards")
    if len(forwards) != len(stream):
        raise InternalError(f"{len(stream)} requests were {len(forwards)} forwards.")
    found: list[tuple[list[Block], list[Block]]] = [([], []) for _ in range(groups)]
    for index, is_first in enumerate(order):
        start = BLOCK * (index + 1)
        block = forwards[start : start + BLOCK + 1]
        found[index // len(ORDER)][0 if is_first else 1].append(block)
    return found
