"""Core knows platforms, and no vendor: neither by a branch nor by an import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sidestream

CORE = Path(sidestream.__file__).parent
FILES = sorted(CORE.rglob("*.py"))
BRANCH = re.compile(r"is_(cuda|npu|rocm|xpu|musa)")
#: Their modules: the plugins', and the packages that plugins import.
VENDORS = re.compile(
    r"(sidestream_\w+|torch_(npu|musa|xla)|intel_extension_for_pytorch|torchada|pynvml|amdsmi"
    r"|pyzes|pymtml|torch\.(cuda|npu|xpu|musa|hip))(\.|$)"
)


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_core_has_files():
    assert len(FILES) > 80


def test_core_has_no_branch_on_a_vendor():
    assert [path.name for path in FILES if BRANCH.search(path.read_text("utf-8"))] == []


def test_core_imports_no_vendor():
    found = {
        (str(path.relative_to(CORE)), name)
        for path in FILES
        for name in imported(ast.parse(path.read_text("utf-8")))
        if VENDORS.match(name)
    }
    assert found == set()


@pytest.mark.parametrize(
    "line", ["import torch_npu", "from torch import cuda", "import torch.xpu as t", "import pynvml"]
)
def test_an_import_of_a_vendor_would_be_seen(line):
    assert any(VENDORS.match(name) for name in imported(ast.parse(line)))
