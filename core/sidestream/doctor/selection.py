"""The platform that an engine would get."""

from __future__ import annotations

import os
from difflib import get_close_matches

from sidestream.doctor.questions import Questions
from sidestream.doctor.report import Selection
from sidestream.errors import ConfigError
from sidestream.platforms.registry import PLATFORM_VARIABLE, Candidate, PlatformRegistry


def select(questions: Questions, argument: str | None) -> Selection:
    """Let a child choose as an engine does, with every plugin in one process; say why it can't."""
    named = argument or os.environ.get(PLATFORM_VARIABLE) or None
    by = "argument" if argument else "variable" if named else "auto"
    answer = questions.ask("select", argument or "")
    if answer.result is not None:
        return Selection(platform=answer.result["platform"], by=by, reason=answer.result["reason"])
    reason = answer.errors[0]["message"].partition("\n")[0] if answer.errors else answer.failure
    known = {candidate.name for candidate in candidates()}
    if named and named not in known and (near := get_close_matches(named, known, 1)):
        reason += f" Did you mean {near[0]!r}?"
    return Selection(platform=None, by=by, reason=reason)


def candidates() -> tuple[Candidate, ...]:
    """List the plugins, the built-in base first; import none."""
    try:
        return PlatformRegistry.discover().candidates
    except ConfigError:  # of SIDESTREAM_PLUGINS, as the selection tells; an engine gets no further
        return PlatformRegistry([]).candidates
