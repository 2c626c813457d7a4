"""The tutorial for plugin authors, followed step by step where only wheels are installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+)\n")


class Author:
    """Somebody with an environment of their own and an empty folder."""

    def __init__(self, environment, folder):
        self.folder = folder
        self._bin = environment / "bin"
        self.printed = []

    def run(self, command):
        """Run a line of shell in the folder; gives what it printed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SIDESTREAM"))}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**kept, "PATH": f"{self._bin}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self.printed.append(done.stdout)
        return done.stdout


@pytest.fixture(scope="module")
def author(wheel, site, tmp_path_factory):
    """Make an environment with the wheel of sidestream and, by a path file, what it needs."""
    environment = tmp_path_factory.mktemp("author") / "env"
    command = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(command, check=True, timeout=60)
    (own_site,) = environment.glob("lib/python*/site-packages")
    # A path file of a path is not followed to the path files there: to no editable install.
    (own_site / "torch-and-tools.pth").write_text(f"{site}\n")
    folder = tmp_path_factory.mktemp("acme")
    author = Author(environment, folder)
    author.run(f"python -m pip install --quiet --no-deps --no-index --force-reinstall {wheel}")
    where = author.run("python -c 'import sidestream; print(sidestream.__file__)'").strip()
    assert where == str(own_site / "sidestream" / "__init__.py")
    return author


@pytest.mark.timeout(600)
def test_the_tutorial_leads_from_an_empty_folder_to_an_engine_on_acme(author):
    for kind, text in BLOCK.findall(PAGE):
        if kind == "sh":
            for line in text.splitlines():
                author.run(line)
        elif kind != "text":
            path = author.folder / FILE_NAME.match(text)[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    first, last = (text for text in author.printed if "PLATFORM" in text)
    assert re.search(r"^ +acme +broken .*lacks the required hook", first, re.MULTILINE)
    assert re.search(r"^\* +acme +available .*sidestream-acme 0.1.0", last, re.MULTILINE)
    [suite] = [text for text in author.printed if "test session starts" in text]
    assert re.search(r"^=+ \d+ passed in ", suite, re.MULTILINE), suite
    assert author.printed[-1] == "acme 1.0 slot\n"


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_what_the_tutorial_made_is_well_for_the_doctor(author):
    if not (author.folder / "dist").exists():
        test_the_tutorial_leads_from_an_empty_folder_to_an_engine_on_acme(author)
    report = json.loads(author.run("sidestream doctor --json --platform acme"))
    assert report["is_usable"]
    assert report["copies"]["platform"] == "acme"
