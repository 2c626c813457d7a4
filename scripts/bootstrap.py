"""Make the environment that tests and the demo need; the standard library is enough to run this.

    python3 scripts/bootstrap.py [FOLDER]        default: .venv

Works where Debian's python3-venv is missing. Versions come from constraints.txt. torch goes in
first, as the CPU build where this machine has no NVIDIA device: left to pip, a machine without
one would download gigabytes of CUDA libraries.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
MINIMUM = (3, 11)
NEWER = ("python3.14", "python3.13", "python3.12", "python3.11")
#: Any of them means that a CUDA build has something to run on; dxg is WSL's.
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_RELEASE = "https://pypi.org/pypi/pip/json"


def main(arguments: list[str]) -> None:
    """Make the environment, or bring an existing one up to date."""
    if sys.version_info < MINIMUM:
        restart_with_newer_python(arguments)
    folder = Path(arguments[0] if arguments else ROOT / ".venv")
    python = folder / "bin" / "python"
    if not has_pip(python):
        say(f"Making {folder} with {sys.executable}")
        make_environment(folder, python)
    install_torch(python)
    say("Installing sidestream with its extras diffusers, video, lora and dev")
    pip_install(python, "--editable", f"{ROOT}[diffusers,video,lora,dev]")


def restart_with_newer_python(arguments: list[str]) -> None:
    for found in filter(None, map(shutil.which, NEWER)):
        os.execv(found, [found, __file__, *arguments])
    version = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"sidestream needs Python 3.11 or newer; {sys.executable} is {version}, and none of "
        f"{', '.join(NEWER)} is on PATH. Install one, or name it: make PYTHON=/path/to/python"
    )


# --- an environment with pip --------------------------------------------------------------


def has_pip(python: Path) -> bool:
    return python.exists() and succeeds(python, "-m", "pip", "--version")


def make_environment(folder: Path, python: Path) -> None:
    if succeeds(sys.executable, "-m", "venv", "--clear", folder) and has_pip(python):
        return
    # Debian keeps ensurepip in python3-venv; the bare environment needs nothing from it.
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    outer_pip = (sys.executable, "-m", "pip", "--python", python)
    if not succeeds(*outer_pip, "install", "--quiet", "pip") or not has_pip(python):
        install_pip_from_its_wheel(python)


def install_pip_from_its_wheel(python: Path) -> None:
    """Fetch pip from PyPI; its wheel can run itself, and so install itself."""
    with urllib.request.urlopen(PIP_RELEASE, timeout=60) as answer:
        files = json.load(answer)["urls"]
    wheel = next(file for file in files if file["packagetype"] == "bdist_wheel")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / wheel["filename"]
        url = urljoin(PIP_RELEASE, wheel["url"])  # a mirror may answer with a relative one
        with urllib.request.urlopen(url, timeout=60) as answer:
            path.write_bytes(answer.read())
        run(python, path / "pip", "install", "--quiet", "--no-index", path)


# --- packages -----------------------------------------------------------------------------


def install_torch(python: Path) -> None:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    torch = next(line.strip() for line in lines if line.startswith("torch=="))
    version = torch.partition("==")[2]
    installed = f"from torch.version import __version__ as v; assert v.split('+')[0] == {version!r}"
    if succeeds(python, "-c", installed):
        return
    if any(Path(node).exists() for node in NVIDIA_NODES):
        say(f"Installing {torch} (this machine has an NVIDIA device)")
        pip_install(python, torch)
        return
    say(f"Installing {torch}, the CPU build (this machine has no NVIDIA device)")
    # --no-deps: in the next step, what torch needs comes in the pinned versions.
    cpu_build = (python, "-m", "pip", "install", *pip_options(), "--no-deps", f"{torch}+cpu")
    # First from where pip looks anyway, a mirror or a folder of wheels; PyPI has no CPU builds.
    if succeeds(*cpu_build) or succeeds(*cpu_build, "--index-url", CPU_INDEX, show=True):
        return
    say(f"{CPU_INDEX} did not give it; taking the default build, which is large")
    pip_install(python, torch)


def pip_install(python: Path, *arguments: str) -> None:
    run(python, "-m", "pip", "install", *pip_options(), "--constraint", CONSTRAINTS, *arguments)


def pip_options() -> tuple[str, ...]:
    """Let pip show its progress to a person, and its errors alone to a log."""
    return ("--disable-pip-version-check", *(() if sys.stdout.isatty() else ("-qq",)))


# --- commands -----------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path) -> None:
    if not succeeds(*command, show=True):
        sys.exit(f"Failed: {' '.join(map(str, command))}")


def succeeds(*command: str | Path, show: bool = False) -> bool:
    output = None if show else subprocess.DEVNULL
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
    )
    return done.returncode == 0


if __name__ == "__main__":
    main(sys.argv[1:])
