"""Each target of the map to the specification exists, and each name has a target or a reason."""

import functools
import importlib
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "spec-map.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| specification")
]
TARGET = re.compile(r"`(sidestream\w*(?:\.\w+)*):(\w+(?:\.\w+)*)`")


def find(module, path):
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def test_the_map_has_the_rows_of_every_part():
    assert len(ROWS) > 35
    assert all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize(("name", "place", "remark"), ROWS, ids=[row[0] for row in ROWS])
def test_a_name_has_a_target_that_exists_or_a_reason(name, place, remark):
    if place == "not needed":
        assert remark
        return
    if place == "later":
        return
    whole = TARGET.fullmatch(place)
    assert whole, f"{name}: {place!r} is neither a target nor 'not needed' nor 'later'"
    find(*whole.groups())


def test_targets_inside_remarks_exist():
    for _, _, remark in ROWS:
        for module, path in TARGET.findall(remark):
            find(module, path)


def test_a_target_that_is_gone_would_be_noticed():
    with pytest.raises(AttributeError):
        find("sidestream.protocol", "AsyncDiffusionOutput.no_such_field")
