"""Pipelines that die, hang, and leave helpers behind, as their options and requests say."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

#: Longer than any test waits.
FOREVER_S = 600
BIG = 50 << 20


class Victim:
    """Tells through one named pipe where it is, and ends itself by orders from another."""

    @classmethod
    def load(cls, config):
        self = cls()
        self.config = config
        self.notes = config.options.get("notes")
        if orders := config.options.get("orders"):
            threading.Thread(target=self.obey, args=(orders,), daemon=True).start()
        act = config.options.get("at_load")
        if act is not None:
            self.act(act)
        return self

    def forward(self, requests):
        tree = {"image": torch.full((3, 64, 64), 7.0, device=self.config.device)}
        if requests[0].prompt == "large head":
            return [{**tree, "text": "x" * BIG, "end": Snag(self)}]
        self.act(requests[0].prompt)
        return [tree]

    def act(self, what):
        match what:
            case "wait":
                self.note()
                time.sleep(FOREVER_S)
            case "wait the second time":
                if (first := Path(self.notes + ".first")).exists():
                    self.act("wait")
                first.touch()
            case "hold the GIL":
                self.note()
                # PyDLL and not CDLL: nothing else of Python runs meanwhile.
                ctypes.PyDLL(None).sleep(FOREVER_S)
            case "exit while holding the GIL":
                self.note()
                ctypes.PyDLL(None).usleep(300_000)
                ctypes.PyDLL(None)._exit(3)
            case "ignore SIGTERM":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self.note()
                time.sleep(FOREVER_S)
            case "fork":
                if os.fork() == 0:
                    time.sleep(FOREVER_S)
                    os._exit(0)
            case "helper":
                subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
            case "idle about":
                self.note()
                while True:
                    time.sleep(0.01)
            case "take a second":
                time.sleep(1)
            case "take three seconds":
                self.note()
                time.sleep(3)
            case "compute":
                self.note()
                a = torch.ones(1000, 1000)
                while True:
                    a = (a @ a).clamp(-1, 1)
            case _:
                assert what == ""

    def note(self):
        """Say that this point is reached."""
        if self.notes:
            with open(self.notes, "w") as notes:
                notes.write(f"{os.getpid()}\n")

    def obey(self, orders):
        with open(orders) as pipe:
            code = pipe.readline()
        os._exit(int(code))

    # --- calls ------------------------------------------------------------------------------------

    def pid(self):
        return os.getpid()

    def print_much(self):
        os.write(1, b"x" * 1000)
        os.write(2, b"x" * 1000)
        print("x" * 1000, flush=True)

    def send_garbage(self):
        """Write to the worker's own connection, as a stray descriptor number does."""
        os.write(int(sys.argv[1]), b"not a frame")
        self.act("wait")

    def close_descriptors(self):
        """Do as a library that makes itself a daemon."""
        os.closerange(3, 1000)
        time.sleep(FOREVER_S)

    def wait(self):
        self.act("wait")

    def large_result(self):
        return [torch.zeros(BIG, dtype=torch.uint8), "x" * BIG, Snag(self)]

    def die_while_writing(self):
        """Be killed as soon as there is memory for a large message, before it is full."""
        threading.Thread(target=kill_at_memfd, args=(4 * BIG,), daemon=True).start()
        return "x" * (4 * BIG)

    def start_helpers(self):
        """Leave a forked child, a started one, and one of either in a session of its own."""
        children = [os.fork()]
        if children[0] == 0:
            time.sleep(FOREVER_S)
            os._exit(0)
        sleeper = [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
        children.append(subprocess.Popen(sleeper).pid)
        apart = [subprocess.Popen(sleeper, start_new_session=True, close_fds=False).pid, os.fork()]
        if apart[1] == 0:
            os.setsid()
            time.sleep(FOREVER_S)
            os._exit(0)
        return children, apart

    def hold_forwards(self):
        from sidestream.testing import sim

        sim.default_stream(0).hold()

    def hold_copies(self):
        from sidestream.testing import sim

        for stream in sim.side_streams(0):
            stream.hold()


class Snag:
    """Cannot be packed to the end: it waits in the middle."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        self.victim.act("wait")


def kill_at_memfd(nbytes):
    me = Path("/proc/self/fd")
    while True:
        for link in me.iterdir():
            try:
                if "memfd:sidestream" in os.readlink(link) and link.stat().st_size >= nbytes:
                    os.kill(os.getpid(), signal.SIGKILL)
            except OSError:
                continue


class OutOfMemory(Victim):
    """Lets the process have little more than it has, and asks for more than that."""

    @classmethod
    def load(cls, config):
        print("loading 10 GiB of weights", file=sys.stderr)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * mmap.PAGESIZE + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        cls.weights = bytearray(10 << 30)


class FullOfMemory(Victim):
    """Uses up what it may have, to the last page, before it fails."""

    @classmethod
    def load(cls, config):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * mmap.PAGESIZE + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        weights = []
        size = 1 << 24
        while True:
            try:
                weights.append(bytearray(size))
            except MemoryError:
                if size == 64:
                    raise
                size //= 2


class Raises(Victim):
    """Has no weights."""

    @classmethod
    def load(cls, config):
        print("looking for the weights", file=sys.stderr)
        raise FileNotFoundError("no weights at /nowhere")


class Exits(Victim):
    """Calls sys.exit while it is loaded."""

    @classmethod
    def load(cls, config):
        print("last words", file=sys.stderr)
        sys.exit(9)
