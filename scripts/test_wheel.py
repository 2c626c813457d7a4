"""Test the built wheel where there are no sources: what users get, not what lies here.

    python scripts/test_wheel.py [--wheel FILE] [--torch VERSION] [--folder DIR] [-- ARGUMENT ...]

Makes an environment in the folder with torch, the wheel and its extras diffusers, video, lora and
test, copies the tests beside it, and runs them there; arguments go to pytest. Tests of the sources
themselves (packaging, docs) stay behind. The wheel is dist/*.whl by default: 'make package'.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bootstrap import (
    CONSTRAINTS,
    CPU_INDEX,
    ROOT,
    has_pip,
    make_environment,
    pip_options,
    run,
    say,
    succeeds,
)

#: Of the tests; the others read or build the sources.
LEFT_BEHIND = ("packaging", "docs", "npu")
#: Beside the tests: what pytest is set up with, and what some tests hold against the code.
COPIED = ("examples", "docs", "pyproject.toml", "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: the one in dist")
    parser.add_argument("--torch", metavar="VERSION", help="default: the pinned one")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "wheel-test")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for pytest")
    options = parser.parse_args()
    wheel = options.wheel or the_wheel()
    environment = options.folder / "env"
    python = environment / "bin" / "python"
    if not has_pip(python):
        say(f"Making {environment} with {sys.executable}")
        make_environment(environment, python)
    constraints = write_constraints(options.folder, options.torch)
    install(python, wheel, constraints)
    tests = copy_tests(options.folder / "tree")
    check_origin(python, environment, tests)
    arguments = options.arguments or ["-m", "not soak"]
    say(f"Testing {wheel.name} in {tests}")
    os.chdir(tests)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(python, [str(python), "-m", "pytest", *arguments])


def the_wheel() -> Path:
    found = sorted((ROOT / "dist").glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"dist has {len(found)} wheels instead of one: make clean package")
    return found[0]


def write_constraints(folder: Path, torch: str | None) -> Path:
    """Write the pinned versions, with another torch where one is asked for."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if torch is not None:
        # What is pinned beside it was resolved for the pinned torch only.
        lines = [line for line in lines if not line.startswith(("torch", "triton", "nvidia"))]
        lines.append(f"torch=={torch}")
    path = folder / "constraints.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def install(python: Path, wheel: Path, constraints: Path) -> None:
    pip = (python, "-m", "pip", "install", *pip_options(), "--constraint", constraints)
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch="))
    say(f"Installing {torch}, the CPU build if there is one")
    cpu_build = (*pip, f"{torch}+cpu")
    if not succeeds(*cpu_build) and not succeeds(*cpu_build, "--index-url", CPU_INDEX):
        run(*pip, torch)
    say(f"Installing {wheel.name}")
    run(*pip, "--force-reinstall", "--no-deps", wheel)
    run(*pip, f"{wheel}[diffusers,video,lora,test]")


def copy_tests(tree: Path) -> Path:
    """Copy tests, examples and the settings of pytest, and nothing that could be imported."""
    shutil.rmtree(tree, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", *LEFT_BEHIND)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=skip)
    for name in COPIED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
    return tree


def check_origin(python: Path, environment: Path, tests: Path) -> None:
    """Make sure that it is the wheel that will be tested."""
    where = subprocess.run(
        [python, "-c", "import sidestream; print(sidestream.__file__)"],
        cwd=tests,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(where).resolve().is_relative_to(environment.resolve()):
        sys.exit(f"sidestream would come from {where}, not from the wheel")


if __name__ == "__main__":
    main()
