"""What the installed torch was built for, read from its files: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sidestream.platforms.machine import installed_version, minor, missing_backend


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The vendor runtimes of a torch build; None where it has none."""

    #: With its local part, such as ``"2.11.0+cu130"``.
    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


def torch_build() -> TorchBuild | None:
    """Read ``torch/version.py``; None: torch is not installed, or this file is not readable."""
    try:
        spec = find_spec("torch")
    except ValueError:  # sys.modules holds something that no import system made
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    values: dict[str, str | None] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = None if value.value is None else str(value.value)
    return TorchBuild(
        version=values.get("__version__") or "unknown",
        cuda=values.get("cuda"),
        hip=values.get("hip"),
        xpu=values.get("xpu"),
    )


def other_build(
    kind: str, fits: Callable[[TorchBuild], bool], install: str, *, why: str = ""
) -> str | None:
    """Say for a probe that torch is missing, or not a build of that kind, and why it has to be."""
    build = torch_build()
    if build is None:
        return f"torch is not installed; install it: {install}"
    if not fits(build):
        return f"torch {build.version} is not {kind} build{why}; install one: {install}"
    return None


def missing_pair(package: str, install: str) -> str | None:
    """Say that torch or a vendor's package for it is missing, or that their numbers differ."""
    missing = missing_backend(package, install)
    if missing is not None:
        return missing
    build, other = torch_build(), installed_version(package)
    if build is None or other is None:
        return f"torch or {package} is not whole; install both again: {install}"
    if minor(other) != minor(build.version):
        return f"{package} {other} does not fit torch {build.version}; install a pair: {install}"
    return None
