"""Switches of single plugins, which are environment variables: a worker has its engine's."""

from __future__ import annotations

import os

from sidestream.errors import ConfigError


def flag(variable: str, default: bool) -> bool:
    """Read a switch, "0" or "1"; unset or empty is ``default``.

    Raises:
        ConfigError: It is something else.
    """
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(variable, value, "0 or 1")
    return default if not value else value == "1"


def nbytes(variable: str, default: int) -> int:
    """Read a number of bytes; unset or empty is ``default``.

    Raises:
        ConfigError: It is no number, or less than 0.
    """
    value = os.environ.get(variable, "").strip()
    if not value:
        return default
    if not value.isdecimal():
        raise ConfigError(variable, value, "a number of bytes")
    return int(value)
