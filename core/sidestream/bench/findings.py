"""What a measurement gave, for a terminal, a file, a plot and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestream.bench.series import Sample
    from sidestream.bench.table import Table


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload's shares of the limit, a round each."""

    name: str
    on: Sequence[float]
    off: Sequence[float]


@dataclass(kw_only=True)
class Findings:
    """Tables, and what was kept of them for pictures."""

    tables: list[Table]
    #: For a plot: the shares of each workload.
    cells: list[Cell] = field(default_factory=list)
    #: For a trace or a timeline: the outputs of one series.
    samples: list[Sample] = field(default_factory=list)
