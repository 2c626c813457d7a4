"""The order of the examination, and the report it ends in."""

from __future__ import annotations

import os
import platform as machine
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from typing import Final

import sidestream
from sidestream.autoload import BACKEND_GROUP
from sidestream.doctor.causes import cause_of
from sidestream.doctor.limits import find_limits
from sidestream.doctor.platforms import Examined, Examiner, is_installed
from sidestream.doctor.questions import Answer, Questions
from sidestream.doctor.report import (
    Copies,
    Finding,
    Report,
    Route,
    State,
    Worth,
)
from sidestream.doctor.selection import candidates, select
from sidestream.doctor.vendors import PATCHERS
from sidestream.platforms.registry import PLATFORM_VARIABLE, Candidate

#: Each waits for a process of its own, or for the answer of one that was started before.
_THREADS: Final = 8
#: A gain below this drowns in the noise of a machine.
_LEAST_GAIN: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to look at."""

    #: None: what an engine would choose.
    platform: str | None = None
    device_index: int = 0
    #: One image of 1024 x 1024 pixels.
    output_bytes: int = 3 << 20
    #: How long a forward takes; None: not known, and no verdict on what overlap gains.
    forward_s: float | None = None
    #: For each child process.
    timeout_s: float = 60.0


def examine(settings: Settings) -> Report:
    """Look at everything; takes seconds, imports neither torch nor a plugin in this process.

    Raises:
        OSError: No process can be started.
    """
    with ThreadPoolExecutor(_THREADS) as threads, Questions(settings.timeout_s) as questions:
        ask = questions.ask
        torch = threads.submit(lambda: _torch_finding(ask("torch")))
        selected = threads.submit(select, questions, settings.platform)
        extensions = _submit_extensions(threads, questions)
        examiner = Examiner(
            questions=questions,
            named=settings.platform or os.environ.get(PLATFORM_VARIABLE) or None,
            device_index=settings.device_index,
            output_bytes=settings.output_bytes,
            torch=torch,
            extensions=extensions,
        )
        first: dict[str, Candidate] = {}
        asked: list[Future[Examined]] = []
        for candidate in candidates():
            holder = first.setdefault(candidate.name, candidate)
            # The registry takes an installed plugin that the variable repeats for one.
            if holder is candidate or holder.reference != candidate.reference:
                asked.append(threads.submit(examiner.examine, candidate, holder))
        selection = selected.result()
        examined = [each.result() for each in asked]
    copies = _copies(examined, selection.platform, settings.output_bytes)
    return Report(
        version=sidestream.__version__,
        python=f"{machine.python_version()} ({sys.executable})",
        system=f"{machine.system()} {machine.release()} {machine.machine()}",
        selection=selection,
        torch=torch.result(),
        platforms=tuple(each.finding for each in examined),
        extensions=tuple(each.result() for each in extensions.values()),
        limits=find_limits(os.environ),
        copies=copies,
        worth=None if settings.forward_s is None else judge(copies, settings.forward_s),
        is_forced=settings.platform is not None,
    )


def judge(copies: Copies | None, forward_s: float) -> Worth:
    """Compare forwards with their copies in between and beside them.

    In between, a forward and its copy take the sum of both; beside, the longer of the two.
    """
    if copies is None:
        return _no_gain(forward_s, 0.0, "the platform copies on the thread that computes")
    route = copies.best
    copy_s = route.output_s
    if not route.is_asynchronous:
        return _no_gain(forward_s, copy_s, "no copy on this device leaves the host free")
    gain = (forward_s + copy_s) / max(forward_s, copy_s) - 1
    if gain < _LEAST_GAIN:
        return _no_gain(forward_s, copy_s, "the copy is short for such a forward", gain)
    limit = " (copies are then what limits)" if copy_s > forward_s else ""
    reason = f"the copy runs beside the next forward{limit}"
    return Worth(forward_s=forward_s, copy_s=copy_s, gain=gain, is_worth_it=True, reason=reason)


def _no_gain(forward_s: float, copy_s: float, reason: str, gain: float = 0.0) -> Worth:
    return Worth(forward_s=forward_s, copy_s=copy_s, gain=gain, is_worth_it=False, reason=reason)


def _submit_extensions(
    threads: ThreadPoolExecutor, questions: Questions
) -> dict[str, Future[Finding]]:
    """Load each package that extends torch, alone; and torch with all that load themselves."""
    submitted: dict[str, Future[Finding]] = {}
    entries = entry_points(group=BACKEND_GROUP)
    for entry in entries:
        submitted[entry.module] = threads.submit(
            _extension_finding, questions, entry.name, entry.module, _title(entry.dist)
        )
    for module in PATCHERS:
        if module not in submitted and is_installed(module):
            brought_by = _title(_distribution(module))
            submitted[module] = threads.submit(
                _extension_finding, questions, module, module, brought_by
            )
    if entries:
        submitted["import torch"] = threads.submit(_autoload_finding, questions)
    return submitted


def _extension_finding(
    questions: Questions, name: str, module: str, distribution: str | None
) -> Finding:
    answer = questions.ask("extension", name, module)
    title = distribution or module
    if answer.result is not None:
        return Finding(name=title, state=State.USABLE, evidence=("it can be loaded",))
    return _broken(title, answer)


def _autoload_finding(questions: Questions) -> Finding:
    """Import torch as a script does that knows nothing of sidestream."""
    name = "import torch"
    answer = questions.ask("torch", autoload=True)
    if answer.result is not None:
        seen = "it works together with what loads itself into torch"
        return Finding(name=name, state=State.USABLE, evidence=(seen,))
    outer = answer.errors[0]["message"].partition("\n")[0] if answer.errors else answer.failure
    return Finding(
        name=name,
        state=State.BROKEN,
        cause="autoload",
        evidence=(outer, *((answer.failure,) if answer.failure != outer else ())),
        advice="Uninstall or mend that package, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 for scripts "
        "of yours; sidestream does so for itself, and its other platforms work.",
    )


def _torch_finding(answer: Answer) -> Finding:
    result = answer.result
    if result is not None:
        built_for = [f"{vendor} {version}" for vendor, version in result["built_for"].items()]
        seen = (
            f"{result['version']}, built for {', '.join(built_for) or 'the CPU'}, "
            f"imported in {result['import_s']:.1f} s from {result['path']}"
        )
        return Finding(name="torch", state=State.USABLE, evidence=(seen,))
    return _broken("torch", answer)


def _broken(name: str, answer: Answer) -> Finding:
    cause = cause_of(answer)
    return Finding(
        name=name,
        state=State.BROKEN,
        cause=cause.word,
        evidence=answer.evidence,
        advice=cause.advice,
    )


def _title(distribution: Distribution | None) -> str | None:
    return None if distribution is None else f"{distribution.name} {distribution.version}"


def _distribution(module: str) -> Distribution | None:
    try:
        return distribution(module)  # names of distributions take "_" for "-"
    except PackageNotFoundError:
        return None


def _copies(examined: Iterable[Examined], selected: str | None, output_bytes: int) -> Copies | None:
    for each in examined:
        if each.finding.name == selected and each.routes:
            return Copies(
                platform=each.finding.name,
                device=each.device,
                output_bytes=output_bytes,
                routes=tuple(Route(**route) for route in each.routes),
            )
    return None
