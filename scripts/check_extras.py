"""Resolve each extra against the package index, installing nothing, and say which torch comes.

    python scripts/check_extras.py [EXTRA ...]        default: all of pyproject.toml

Needs a network. Exits with 1 when an extra does not resolve, brings a torch that it should not, or
when two that pyproject.toml does not declare as conflicting could not be installed together.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
#: Their torch is on an index of the vendor's: PyPI's, a CUDA build, must not come along.
WITHOUT_TORCH = {"rocm", "xpu", "musa"}
#: The release of torch that an extra is bound to, by the package that binds it.
TORCH_FOLLOWS = {"npu": "torch-npu", "ipex": "intel-extension-for-pytorch"}
TIMEOUT_S = 600


class Unresolvable(Exception):
    """pip found no set of versions."""


def resolve(*extras: str) -> dict[str, str]:
    """Give the versions of what would be installed, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), f"{ROOT}[{','.join(extras)}]"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Unresolvable(errors[-1] if errors else done.stderr[-500:])
        items: list[dict[str, Any]] = json.loads(report.read_text("utf-8"))["install"]
    found = (item["metadata"] for item in items)
    return {each["name"].lower().replace("_", "-"): each["version"] for each in found}


def complaint(extra: str, versions: dict[str, str]) -> str | None:
    """Say what is wrong with what an extra brings, or None."""
    torch = versions.get("torch")
    if extra in WITHOUT_TORCH and torch is not None:
        return f"brings torch {torch} from the default index; the vendor's has to be there before"
    if (leader := TORCH_FOLLOWS.get(extra)) is not None:
        wanted, got = (re.match(r"\d+\.\d+", versions[name]) for name in (leader, "torch"))
        if wanted is None or got is None or wanted[0] != got[0]:
            return f"brings {leader} {versions[leader]} beside torch {torch}"
    named = {re.split(r"[^\w.-]", need)[0].lower() for need in EXTRAS[extra]} - {"sidestream"}
    missing = named - versions.keys()
    return f"does not bring {', '.join(sorted(missing))}" if missing else None


def conflicting_pairs() -> set[frozenset[str]]:
    """Give the pairs of extras that pyproject.toml declares as conflicting."""
    sets = [[item["extra"] for item in group] for group in PROJECT["tool"]["uv"]["conflicts"]]
    return {frozenset((a, b)) for group in sets for a in group for b in group if a != b}


def undeclared_conflict(extra: str, conflicts: set[frozenset[str]]) -> str | None:
    """Resolve a platform's extra together with all others that it may be combined with."""
    platforms = {name for pair in conflicts for name in pair}
    if extra not in platforms:
        return None  # it is part of every such combination
    others = [other for other in EXTRAS if frozenset((extra, other)) not in conflicts]
    together = [other for other in others if other == extra or other not in platforms]
    try:
        resolve(*together)
    except Unresolvable as error:
        return f"can't be combined with {', '.join(together)}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="default: all")
    chosen = parser.parse_args().extras or list(EXTRAS)
    if unknown := set(chosen) - EXTRAS.keys():
        parser.error(f"no extra is named {', '.join(sorted(unknown))}")
    conflicts = conflicting_pairs()
    failures = 0
    for extra in chosen:
        versions: dict[str, str] = {}
        try:
            versions = resolve(extra)
            problem = complaint(extra, versions) or undeclared_conflict(extra, conflicts)
        except Unresolvable as error:
            problem = f"does not resolve: {error}"
        failures += problem is not None
        torch = f"torch {versions['torch']}" if "torch" in versions else "no torch"
        outcome = problem or f"{len(versions)} packages, {torch}"
        print(f"{'FAIL' if problem else 'ok':4} {extra:10} {outcome}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
