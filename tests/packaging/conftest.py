"""The wheel, built once, and the site-packages of this environment under conditions."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site():
    """Give the folder of everything that is installed beside this Python."""
    return Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the wheel of the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """Unpack the wheel into a folder of its own, as pip does."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", folder, wheel], check=True, timeout=240)
    return folder


@pytest.fixture(scope="session")
def run_with():
    """Give a function that runs a script with these folders as all of its site-packages."""

    def run(script, *folders, timeout=240):
        # -S: no .pth file, so the editable install of this environment is not there.
        path = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}\n"
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", path + script],
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
