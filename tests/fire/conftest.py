"""What the tests under fire share: engines that may be hurt, and scripts with engines in them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import sidestream

PIPELINES = str(Path(__file__).parents[1] / "pipelines")

#: What is promised within a second is given more by tests that share their machine.
PROMPT_S = 5.0

_PRELUDE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {PIPELINES!r})
import sidestream
from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig

def start(pipeline="Victim", **config):
    config.setdefault("platform", "cpu")
    config.setdefault("max_restarts", 0)
    return DiffusionEngine(EngineConfig(pipeline="fire_pipes:" + pipeline, **config))

def say(*words):
    print(*words, flush=True)

def noted(path, lines=1):
    # For writing too: otherwise it waits for a writer that may have come and gone.
    with os.fdopen(os.open(path, os.O_RDWR), "rb", buffering=0) as pipe:
        text = b""
        while text.count(b"\\n") < lines:
            text += pipe.read(100)
    return text.decode()
"""


@pytest.fixture(autouse=True, scope="session")
def _pipelines_on_path() -> Iterator[None]:
    sys.path.insert(0, PIPELINES)
    yield
    sys.path.remove(PIPELINES)


@pytest.fixture
def start() -> Iterator[Callable[..., sidestream.DiffusionEngine]]:
    """Make engines by the name of a pipeline of ``fire_pipes``; closed at the end."""
    engines = []

    def make(pipeline: str = "Victim", **config) -> sidestream.DiffusionEngine:
        config.setdefault("platform", "cpu")
        config.setdefault("start_timeout_s", 200)
        config.setdefault("max_restarts", 0)  # restarts have tests of their own
        reference = pipeline if ":" in pipeline else f"fire_pipes:{pipeline}"
        engine = sidestream.DiffusionEngine(sidestream.EngineConfig(pipeline=reference, **config))
        engines.append(engine)
        return engine

    yield make
    while engines:
        engines.pop().close(timeout_s=2)


class Script:
    """A Python program in a session of its own, and everything that it starts."""

    def __init__(self, body: str, *arguments: object, before: Sequence[str] = (), **popen) -> None:
        #: Found again in the environment of every descendant, whatever its parent or session.
        self._mark = f"{uuid.uuid4()}"
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", _PRELUDE + body, *map(str, arguments)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
            text=True,
            start_new_session=True,
            env={**os.environ, "MARK_OF_A_TEST": self._mark},
        )
        self.pid = self.process.pid
        self._printed = b""

    def line(self, timeout_s: float = 60) -> list[str]:
        """Read the words of the next line that it prints."""
        # Past the file object, in whose buffer select() would miss a line.
        stdout = self.process.stdout.fileno()
        while b"\n" not in self._printed:
            if not select.select([stdout], [], [], timeout_s)[0]:
                self.process.kill()
                # Not to its end, which a process that it started may keep open.
                said = os.read(self.process.stderr.fileno(), 1 << 16) if self._has_said() else b""
                pytest.fail(f"The script printed nothing for {timeout_s} s:\n{said.decode()}")
            chunk = os.read(stdout, 1 << 16)
            if not chunk:
                pytest.fail(f"The script ended early:\n{self.process.stderr.read()}")
            self._printed += chunk
        line, _, self._printed = self._printed.partition(b"\n")
        return line.decode().split()

    def _has_said(self) -> bool:
        return bool(select.select([self.process.stderr], [], [], 0)[0])

    def signal_group(self, number: int) -> None:
        """Send a signal to the script's process group, as a terminal does."""
        os.killpg(self.pid, number)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Wait for the end of the script and of its output; gives exit code and stderr."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr

    def family(self) -> set[int]:
        """Find the processes that are left of it."""
        return {
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if self._mark.encode() in _read(path)
        }

    def files(self, prefix: str) -> set[str]:
        """Find the files that its processes have open or mapped and whose names begin so."""
        maps = [
            name
            for pid in self.family()
            for line in _read(Path(f"/proc/{pid}/maps")).decode().splitlines()
            if (name := line[73:]).startswith(prefix)
        ]
        links = [
            name
            for pid in self.family()
            for link in Path(f"/proc/{pid}/fd").glob("*")
            if (name := _target(link)).startswith(prefix)
        ]
        return {*maps, *links}

    def is_gone(self, within_s: float, *, but: set[int] = frozenset()) -> bool:
        """Wait until nothing is left of it, except for ``but``."""
        deadline = time.monotonic() + within_s
        while self.family() - but:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def clear(self) -> None:
        """End what is left."""
        for pid in self.family():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # gone, or a zombie


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # closed meanwhile, or its process is gone


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    """Run programs that find ``start(pipeline, **config)`` and ``say(*words)`` defined."""
    scripts = []

    def run(body: str, *arguments: object, **settings) -> Script:
        scripts.append(Script(body, *arguments, **settings))
        return scripts[-1]

    yield run
    for one in scripts:
        one.clear()


class Pipes:
    """Named pipes to a worker: where it is, and how it shall end."""

    def __init__(self, folder: Path) -> None:
        self.notes, self.orders = folder / "notes", folder / "orders"
        os.mkfifo(self.notes)
        os.mkfifo(self.orders)
        # Non-blocking, else it would wait here for the first writer.
        self._notes = os.open(self.notes, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def options(self) -> dict[str, str]:
        return {"notes": str(self.notes), "orders": str(self.orders)}

    def note(self, timeout_s: float = 60) -> int:
        """Wait until the worker is where the test wants it; gives its pid."""
        deadline = time.monotonic() + timeout_s
        # Without a writer it is at its end, which counts as readable.
        while not (note := _read_some(self._notes)):
            if time.monotonic() > deadline:
                pytest.fail(f"The worker did not get there within {timeout_s} s.")
            time.sleep(0.005)
        return int(note)

    def order_exit(self, code: int) -> None:
        """Have the worker call ``os._exit``, whatever else it does."""
        self.orders.write_text(f"{code}\n")

    def close(self) -> None:
        os.close(self._notes)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 100)
    except BlockingIOError:
        return b""


@pytest.fixture
def pipes(tmp_path) -> Iterator[Pipes]:
    pipes = Pipes(tmp_path)
    yield pipes
    pipes.close()


@pytest.fixture
def eventually() -> Callable[..., bool]:
    """Wait until a condition holds, as ``assert eventually(lambda: ...)``."""
    return _holds_soon


def _holds_soon(condition: Callable[[], bool], within_s: float = PROMPT_S) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


#: What the outputs of ``couriers`` may take: eight of 1 MiB.
COURIERS_BYTES = 8 << 20


@pytest.fixture(scope="session")
def couriers() -> Iterator[Callable[[tuple[str, str]], sidestream.DiffusionEngine]]:
    """Give engines by (platform, executor) that bring payloads, with little memory for outputs."""
    import payload_pipes

    running = {}

    def get(way: tuple[str, str]) -> sidestream.DiffusionEngine:
        if way not in running:
            running[way] = payload_pipes.start(*way, host_buffer_bytes=COURIERS_BYTES)
        engine = running[way]
        payload_pipes.settle(engine)
        assert _holds_soon(lambda: engine.stats()["ready_bytes"] == engine.stats()["outputs"] == 0)
        return engine

    yield get
    for engine in running.values():
        engine.close(timeout_s=2)


@pytest.fixture(scope="session")
def shared() -> Iterator[Callable[..., sidestream.DiffusionEngine]]:
    """Give engines that tests leave as healthy as they were: a start costs seconds."""
    running = {}

    def get(reference: str, platform: str = "cpu", executor: str = "multiproc", **config):
        config.setdefault("max_restarts", 0)
        key = reference, platform, executor, *sorted(config)
        engine = running.get(key)
        if engine is None or not engine.health().ok:
            engine = running[key] = sidestream.DiffusionEngine(
                sidestream.EngineConfig(
                    pipeline=reference,
                    platform=platform,
                    executor=executor,
                    start_timeout_s=200,
                    **config,
                )
            )
        assert engine.drain(30)
        return engine

    yield get
    for engine in running.values():
        engine.close(timeout_s=2)
