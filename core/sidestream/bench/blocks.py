"""Two ways in short blocks that take turns, compared block by block.

What else a machine does slows series of a second by 10 to 20 %, and both of two blocks that follow
each other within some hundredths of a second about alike.
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


def pairs_in(seconds: float, forward_s: float) -> int:
    """Give how many pairs of blocks take about that long; one at least."""
    return max(1, round(seconds / (2 * BLOCK * forward_s)))


def is_first(pairs: int) -> list[bool]:
    """Tell for each block whether it is the first way's.

    Every other pair runs the other way round, so that a machine that becomes faster or slower
    favors neither.
    """
    return [first for pair in range(pairs) for first in ((True, False), (False, True))[pair % 2]]


def run_blocks(
    engine: DiffusionEngine, first: Workload, second: Workload, pairs: int
) -> list[tuple[list[Forward], list[Forward]]]:
    """Run both in one stream of requests without a pause, and give each pair's forwards.

    A block's forwards are all of them and the first one behind it, which tells when its last one's
    time was over. A block that is not counted runs in front, until the engine is in its stride.

    Raises:
        InternalError: An output is not its request's.
    """
    order = is_first(pairs)
    lead = [first if order[0] else second] * BLOCK
    stream = [*lead, *((first if way else second) for way in order for _ in range(BLOCK)), second]
    call(engine, "take_forwards")
    requests = (workload.request(number) for number, workload in enumerate(stream))
    for number, output in enumerate(engine.imap(requests)):
        sample_of(stream[number], output, number)
        del output  # its slot is free while the next one is waited for
    forwards: list[Forward] = call(engine, "take_forwards")
    if len(forwards) != len(stream):
        raise InternalError(f"{len(stream)} requests were {len(forwards)} forwards.")
    blocks = [
        forwards[start : start + BLOCK + 1] for start in range(BLOCK, len(forwards) - 1, BLOCK)
    ]
    found = []
    for pair in range(pairs):
        one, other = blocks[2 * pair : 2 * pair + 2]
        found.append((one, other) if order[2 * pair] else (other, one))
    return found
