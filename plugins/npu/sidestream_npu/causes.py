"""What is wrong where torch_npu can't be used: looked up in files, nothing of it is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sidestream.platforms.machine import installed_version, minor, missing_libraries
from sidestream.platforms.torch_build import torch_build

INSTALL: Final = (
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu, and then "
    "pip install torch-npu==2.13.0"
)


def unfit_torch() -> str | None:
    """Say that torch and torch_npu are not made for each other."""
    build, npu = torch_build(), installed_version("torch-npu")
    if build is None or npu is None:
        return f"torch or torch_npu is not whole; install both again: {INSTALL}"
    if build.cuda is not None:
        return (
            f"torch {build.version} is a CUDA build, in which torch_npu ends the process at its "
            f"import; install the CPU build: {INSTALL}"
        )
    if minor(npu) != minor(build.version):
        return f"torch_npu {npu} does not fit torch {build.version}; install a pair: {INSTALL}"
    return None


def missing_cann() -> str | None:
    """Say that CANN's libraries can't be found."""
    home = os.environ.get("ASCEND_HOME_PATH")
    return missing_libraries(
        ("libascendcl.so", "libhccl.so"),
        "install CANN and source its set_env.sh",
        folders=(Path(home) / "lib64",) if home else (),
    )
