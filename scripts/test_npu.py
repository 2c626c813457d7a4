"""Run tests/npu: the real torch_npu, over a simulated ACL runtime, on any Linux machine.

    python3 scripts/test_npu.py [ARGUMENT_OF_PYTEST ...]

Makes .venv-npu, which has torch's CPU build and torch_npu (on any other build torch_npu ends the
process); builds the simulator with g++; and starts pytest in it with LD_LIBRARY_PATH, which the
loader reads only when a process starts. Both are kept for the next time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bootstrap import (
    CPU_INDEX,
    MINIMUM,
    ROOT,
    has_pip,
    make_environment,
    pip_install,
    pip_options,
    restart_with_newer_python,
    run,
    say,
    succeeds,
)

ENVIRONMENT = ROOT / ".venv-npu"
LIBRARIES = ROOT / "build" / "aclsim"
TESTS = ROOT / "tests" / "npu"
VERSION = "2.13.0"
#: What torch_npu links to; all of it is in one file here.
NAMES = (
    *("libascendcl.so", "libhccl.so", "libacl_op_compiler.so"),
    *("libge_runner.so", "libgraph.so", "libacl_tdt_channel.so"),
)


def main(arguments: list[str]) -> None:
    """Make what is missing, then become pytest."""
    if sys.version_info < MINIMUM:
        restart_with_newer_python(arguments)
    python = ENVIRONMENT / "bin" / "python"
    make(python)
    if shutil.which("g++") is None:
        say("There is no g++: without the simulator the tests will be skipped")
    else:
        build(headers(python))
    searched = [str(LIBRARIES), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(searched), "OMP_NUM_THREADS": "1"}
    # Only the plugin imports torch_npu, as in a worker.
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.execve(python, [str(python), "-m", "pytest", str(TESTS), *arguments], environment)


def make(python: Path) -> None:
    """Install torch, torch_npu and what the tests need, in this order."""
    stamp, project = ENVIRONMENT / ".installed", ROOT / "pyproject.toml"
    if stamp.exists() and stamp.stat().st_mtime > project.stat().st_mtime:
        return
    if not has_pip(python):
        say(f"Making {ENVIRONMENT}")
        make_environment(ENVIRONMENT, python)
    say(f"Installing torch {VERSION} (the CPU build) and torch-npu {VERSION}")
    cpu_build = (python, "-m", "pip", "install", *pip_options(), f"torch=={VERSION}+cpu")
    if not succeeds(*cpu_build) and not succeeds(*cpu_build, "--index-url", CPU_INDEX, show=True):
        sys.exit(f"torch {VERSION}+cpu can be had neither from pip's own index nor {CPU_INDEX}")
    pip_install(
        *(python, f"torch-npu=={VERSION}", "pytest", "pytest-timeout", "--editable", str(ROOT))
    )
    stamp.touch()


def headers(python: Path) -> Path:
    """Find the ACL headers in torch_npu's wheel, without importing it."""
    find = "from importlib.util import find_spec; print(find_spec('torch_npu').origin)"
    found = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip()).parent / "include" / "third_party" / "acl" / "inc"


def build(include: Path) -> None:
    """Compile the simulator, unless it is newer than its sources."""
    library = LIBRARIES / NAMES[0]
    sources = sorted((TESTS / "aclsim").glob("*.?pp"))
    newest = max(source.stat().st_mtime for source in sources)
    if library.exists() and library.stat().st_mtime > newest:
        return
    say(f"Building {library}")
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    units = [source for source in sources if source.suffix == ".cpp"]
    run(
        *(
            "g++",
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-deprecated-declarations",
        ),
        *("-shared", "-fPIC", "-pthread", "-isystem", include, "-Wl,-soname," + NAMES[0]),
        *("-o", library, *units),
    )
    for name in NAMES[1:]:
        (LIBRARIES / name).unlink(missing_ok=True)
        (LIBRARIES / name).symlink_to(NAMES[0])


if __name__ == "__main__":
    main(sys.argv[1:])
