"""The table of what was run on what is one table, in README and docs, and has every platform."""

from __future__ import annotations

import re
from pathlib import Path

from sidestream.platforms.registry import PlatformRegistry

ROOT = Path(__file__).parents[2]
#: The only claims there are, from the strongest to the weakest.
CLAIMS = ("the whole suite", "hardware: ", "real package on a simulator: ", "shape only: ")


def rows(page):
    """Give the table's rows by platform; links lead from elsewhere and are left out."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
    table = re.search(r"^\| platform \| extra .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip("|").split("|") for line in table[0].splitlines()[2:]]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_readme_and_the_page_on_platforms_say_the_same():
    assert rows(ROOT / "README.md") == rows(ROOT / "docs" / "platforms.md")


def test_every_platform_has_its_row():
    ours = {
        record.name
        for record in PlatformRegistry.discover().records
        if (record.distribution or "").startswith("sidestream ")
    }
    assert set(rows(ROOT / "docs" / "platforms.md")) == ours


def test_each_row_makes_one_of_the_claims_and_has_a_date():
    for name, (extra, claim, date) in rows(ROOT / "docs" / "platforms.md").items():
        assert extra, name
        assert claim.startswith(CLAIMS), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), name
