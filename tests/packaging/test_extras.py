"""Each platform has an extra, and no two of them fit into one environment."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
VENDORS = set(PROJECT["project"]["entry-points"]["sidestream.platforms"]) - {"sim"}
PLATFORMS = {"cpu", "ipex", *VENDORS}


def names(extra):
    return {re.split(r"[^\w-]", requirement)[0] for requirement in EXTRAS[extra]}


def test_every_platform_has_an_extra():
    assert EXTRAS.keys() >= PLATFORMS
    assert "all" not in EXTRAS


def test_all_of_them_are_declared_as_conflicting():
    [group] = PROJECT["tool"]["uv"]["conflicts"]
    assert {item["extra"] for item in group} == PLATFORMS


@pytest.mark.parametrize("extra", ["rocm", "xpu", "musa"])
def test_where_torch_is_not_on_pypi_the_extra_does_not_name_it(extra):
    assert not names(extra) & {"torch", "amdsmi"}


@pytest.mark.parametrize("page", ["README.md", "docs/dependencies.md"])
@pytest.mark.parametrize("extra", sorted(PLATFORMS))
def test_every_extra_is_in_the_documents(extra, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(rf"\[{extra}[,\]]|^\| `{extra}` \|", text, re.MULTILINE)
