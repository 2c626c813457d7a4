"""Questions to child processes: spawned, watched, ended, and their answers read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from sidestream.autoload import AUTOLOAD_VARIABLE
from sidestream.errors import signal_name

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[2])
# -P keeps the working directory off the path while sidestream is imported; then the parent's path.
_BOOT: Final = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); import json; "
    "from sidestream.doctor.child import main; "
    "sys.path[:] = json.loads(sys.argv[1]); main(int(sys.argv[2]), sys.argv[3], sys.argv[4:])"
)
#: A stack of C++ frames may stand behind what tells the cause.
_TAIL_BYTES: Final = 1 << 16
_LINE_LENGTH: Final = 200
_POLL_S: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a child said, or how it ended without an answer."""

    result: Mapping[str, Any] | None
    #: The error and its causes, the outermost first: ``type`` and ``message`` each.
    errors: tuple[Mapping[str, str], ...]
    #: What it was doing last.
    stage: str
    #: Negative for a signal; None: it was killed because its time was over.
    exit_code: int | None
    elapsed_s: float
    #: The end of what it printed.
    output: str

    @property
    def is_hung(self) -> bool:
        """Whether its time was over."""
        return self.exit_code is None

    @property
    def is_crashed(self) -> bool:
        """Whether the process ended without an answer."""
        return not self.is_hung and self.result is None and not self.errors

    @property
    def text(self) -> str:
        """All that may tell a cause."""
        errors = (f"{error['type']}: {error['message']}" for error in self.errors)
        return "\n".join((*errors, self.output))

    @property
    def failure(self) -> str:
        """Say in one line how it failed."""
        if self.is_hung:
            return f"no answer after {self.elapsed_s:.0f} s, while {self.stage}"
        if self.errors:
            # The innermost is the vendor's own, the outer ones say who called.
            return _described(self.errors[-1])
        code = self.exit_code or 0
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        said = self._said_at_last
        return f"the process ended ({how}) while {self.stage}{f': {said}' if said else ''}"

    @property
    def _said_at_last(self) -> str:
        """Give the line of the output that tells most: behind a crash stand stacks."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        for start in ("what():", "Fatal Python error:"):
            if found := [line.removeprefix(start) for line in lines if line.startswith(start)]:
                return found[0].strip()[:_LINE_LENGTH]
        return lines[-1][:_LINE_LENGTH] if lines else ""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Say how it failed, and what it printed last, unless that says the same."""
        said = self._said_at_last
        if self.errors and said and said not in self.failure:
            return self.failure, f"it printed: {said}"
        return (self.failure,)


class Questions:
    """Asks children, from several threads at once; after the block those still there end."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s: Final = timeout_s
        self._is_closed = False

    def __enter__(self) -> Questions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Each asking thread sees it and ends its own child.
        self._is_closed = True

    def ask(self, question: str, *arguments: str, autoload: bool = False) -> Answer:
        """Ask in a process of its own, without torch's loading of extensions unless told."""
        if self._is_closed:
            raise InterruptedError("The examination was given up.")
        environment = dict(os.environ)
        if not autoload:
            environment[AUTOLOAD_VARIABLE] = "0"
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as printed:
            path = json.dumps([entry for entry in sys.path if entry])
            fd = said.fileno()
            command = [sys.executable, "-P", "-c", _BOOT, path, str(fd), question, *arguments]
            began = time.monotonic()
            # In a group of its own, so that what it starts goes with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=environment,
                pass_fds=(fd,),
                start_new_session=True,
            )
            try:
                is_over = self._wait(process, began + self._timeout_s)
            finally:
                # Before it is reaped: its number, which names the group, can't be another's yet.
                _kill(process)
            exit_code = process.returncode if is_over else None
            said.seek(0)
            printed.seek(0, os.SEEK_END)
            printed.seek(max(0, printed.tell() - _TAIL_BYTES))
            output = printed.read().decode("utf-8", "replace")
            lines = said.read().decode("utf-8", "replace").splitlines()
            return _answer(lines, exit_code, time.monotonic() - began, output)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Wait for the child's end without reaping it; False: its time is over."""
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, process.pid, how) is None:
            if self._is_closed or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _answer(lines: list[str], exit_code: int | None, elapsed_s: float, output: str) -> Answer:
    result, errors, stage = None, (), "starting"
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # the last one, cut by the child's death
            continue
        stage = said.get("stage", stage)
        result = said.get("result", result)
        errors = tuple(said.get("error", errors))
    return Answer(
        result=result,
        errors=errors,
        stage=stage,
        exit_code=exit_code,
        elapsed_s=elapsed_s,
        output=output,
    )


def _described(error: Mapping[str, str]) -> str:
    message = error["message"].strip().partition("\n")[0]
    return f"{error['type']}: {message}" if message else error["type"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child's whole group, itself included, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:  # the group holds a process of another user
        process.kill()
    process.wait()
