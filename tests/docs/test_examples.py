"""The Python in the documentation runs as it stands there.

A block whose first line is a comment with a file name is saved under that name, any other is run,
in the order of the page and in one folder. One that is marked "python fragment" lacks what came
before it; the public names in it have to exist.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sidestream

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAGMENT = re.compile(r"^```python fragment\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {page: BLOCK.findall(page.read_text(encoding="utf-8")) for page in PAGES}


def run_page(page, folder):
    """Save or run the page's blocks; give how many ran."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    scripts = 0
    for block in BLOCKS[page]:
        if named := FILE_NAME.match(block):
            (folder / named[1]).write_text(block, encoding="utf-8")
            continue
        (folder / "script.py").write_text(block, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        scripts += 1
    return scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page, blocks in BLOCKS.items() if blocks and page != README],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs(page, tmp_path):
    assert run_page(page, tmp_path) > 0


FRAGMENTS = [block for page in PAGES for block in FRAGMENT.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize("block", FRAGMENTS)
def test_a_fragment_is_python_and_its_public_names_exist(block):
    compile(block, "fragment", "exec")
    names = re.findall(r"\bsidestream\.(\w+)", block)
    assert [name for name in names if not hasattr(sidestream, name)] == []


@pytest.mark.slow
def test_the_example_of_the_readme_draws_what_it_says_in_twelve_lines(tmp_path):
    assert len(BLOCKS[README][0].splitlines()) <= 12
    assert run_page(README, tmp_path) == 1
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "7.png",
        "three.png",
        "a handwritten 0.png",
    }


def test_the_plugin_of_the_readme_is_a_plugin(tmp_path):
    source = next(block for block in BLOCKS[README] if "TorchDevice" in block)
    (tmp_path / "sidestream_acme.py").write_text(source, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "SIDESTREAM_PLUGINS": "acme=sidestream_acme",
    }
    listed = subprocess.run(
        [sys.executable, "-m", "sidestream.cli.main", "plugins", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    acme = {plugin["name"]: plugin for plugin in json.loads(listed.stdout)}["acme"]
    assert acme["state"] == "absent"
    assert acme["reason"] == "torch_acme is missing: pip install torch-acme"
    assert "record_device_event" in acme["hooks"]
