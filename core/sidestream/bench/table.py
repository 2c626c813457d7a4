"""Tables of figures with their bounds, and goals that are met or missed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a figure should be."""

    what: str
    value: float
    #: What it may be at most, or at least.
    bound: float
    at_least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Tell whether the value keeps its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        state = "met   " if self.is_met else "MISSED"
        unit = f" {self.unit}" if self.unit else ""
        return f"{state} {self.what}: {_shown(self.value)}{unit} {sign} {_shown(self.bound)}{unit}"


@dataclass(kw_only=True, eq=False)
class Table:
    """Rows of figures; a column is the key of a row."""

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: How long the measurement took; None of a table that is not complete.
    took_s: float | None = None

    def add(self, **figures: Any) -> None:
        """Add a row."""
        self.rows.append(figures)

    def goal(self, what: str, value: float | None, **bound: Any) -> None:
        """Hold a figure against a bound; nothing if there is no figure."""
        if value is not None and not math.isnan(value):
            self.goals.append(Goal(what=what, value=value, **bound))

    def to_text(self) -> str:
        """Lay it out for a terminal."""
        lines = [self.title]
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        cells = [columns, *([_shown(row.get(c)) for c in columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        for line in cells if self.rows else ():
            first, *rest = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            lines.append("  ".join((first, *rest)).rstrip())
        lines += [*map(str, self.goals), *self.notes]
        if self.took_s is not None:
            lines.append(f"(measured in {self.took_s:.0f} s)")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
        goals = [
            {
                "what": goal.what,
                "value": goal.value,
                "bound": goal.bound,
                "at_least": goal.at_least,
                "unit": goal.unit,
                "met": goal.is_met,
            }
            for goal in self.goals
        ]
        return {
            "name": self.name,
            "title": self.title,
            # JSON knows no nan.
            "rows": [{name: _given(value) for name, value in row.items()} for row in self.rows],
            "goals": goals,
            "notes": self.notes,
            "took_s": self.took_s,
        }


def _given(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # Shares need their fourth digit, times of hours no decimals.
        return f"{value:.4f}" if 0.5 <= abs(value) < 2 else f"{value:.4g}"
    return str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """Give the value that ``share`` of ``values`` are not above; nan of none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    """Give the median; nan of none."""
    return statistics.median(values) if values else math.nan


def known(values: Sequence[float | None]) -> list[float]:
    """Leave out what is None."""
    return [value for value in values if value is not None]


def to_json(tables: Sequence[Table], about: Mapping[str, Any]) -> dict[str, Any]:
    """Put tables into one document, with what they were measured on."""
    return {"about": dict(about), "tables": [table.to_json() for table in tables]}
