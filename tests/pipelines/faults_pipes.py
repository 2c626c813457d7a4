"""A pipeline that fails in every way, for tests of what an engine makes of it."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import numpy as np
import torch

from sidestream.errors import ExecutionError

CREATOR_PID = os.getpid()


# --- exceptions -----------------------------------------------------------------------------------


class HoldsLock(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class OtherSignature(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}: {hint}")


class ReduceRaises(Exception):
    def __reduce__(self):
        raise ValueError("no way to take this apart")


class ReduceExits(Exception):
    def __reduce__(self):
        raise SystemExit(9)


class SetstateRaises(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.more = 1

    def __setstate__(self, state):
        raise ValueError("no way to put this together")


class StrRaises(Exception):
    def __str__(self):
        raise ValueError("no words")


class StrExits(Exception):
    def __str__(self):
        raise SystemExit(9)


class IsFalse(Exception):
    def __bool__(self):
        return False


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class LockedExecutionError(ExecutionError):
    """One of sidestream's own that can't travel."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class Keeps(Exception):
    """Keeps whatever it is given."""

    def __init__(self, message, kept=None):
        super().__init__(message)
        self.kept = kept


def _only_here():
    """Make an exception of a class that the main process can't import."""
    module = types.ModuleType("only_in_the_worker")
    sys.modules[module.__name__] = module
    exec("class Strange(Exception): ...", module.__dict__)
    return module.Strange("from nowhere")


def _cycle():
    first, second = ValueError("first of a cycle"), KeyError("second of a cycle")
    first.__cause__, second.__cause__ = second, first
    return first


def _chain(length):
    error = ValueError("the deepest")
    for number in range(length):
        outer = RuntimeError(f"link {number}")
        outer.__cause__ = error
        error = outer
    return error


POISONS = {
    "holds a lock": lambda: HoldsLock("locked in"),
    "other signature": lambda: OtherSignature(7, hint="look here"),
    "reduce raises": lambda: ReduceRaises("in one piece"),
    "reduce exits": lambda: ReduceExits("in one piece"),
    "setstate raises": lambda: SetstateRaises("apart for good"),
    "class is missing in main": _only_here,
    "str raises": lambda: StrRaises(),
    "str exits": lambda: StrExits(),
    "is false": lambda: IsFalse("not true"),
    "is frozen": lambda: Frozen(5),
    "own error that can't travel": lambda: LockedExecutionError("ours, locked"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("not by a keyboard"),
    "GeneratorExit": lambda: GeneratorExit("enough"),
    "StopIteration": lambda: StopIteration("no more"),
    "group": lambda: ExceptionGroup("several", [ValueError("one"), HoldsLock("two")]),
    "base group": lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("two")]),
    "cycle of causes": _cycle,
    "chain of 100 causes": lambda: _chain(100),
    "400 KB message": lambda: ValueError("x" * 400_000),
    "3 MB message": lambda: ValueError("y" * 3_000_000),
    "holds 30 MB": lambda: Keeps("heavy", np.zeros(30 << 20, dtype=np.uint8)),
}


# --- payload objects ------------------------------------------------------------------------------


class Stubborn:
    """Can't be taken apart."""

    def __init__(self, kind=ValueError):
        self.kind = kind

    def __reduce__(self):
        raise self.kind("stays in one piece")


class Fragile:
    """Can be taken apart, but put together only where it was made, if anywhere."""

    def __init__(self, kind=ValueError, also_at_home=False):
        self.state = kind, os.getpid(), also_at_home

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.state = kind, pid, also_at_home = state
        if also_at_home or pid != os.getpid():
            raise kind("fell apart")


# --- pipelines ------------------------------------------------------------------------------------


class Faulty:
    """Does what its prompt says; ``inputs`` are its arguments."""

    @classmethod
    def load(cls, config):
        self = cls()
        self.device = config.device
        if config.options.get("fail_from_load_on"):
            self.set_faults(**config.options["fail_from_load_on"])
        return self

    def forward(self, requests):
        (request,) = requests
        do = getattr(self, f"do_{request.prompt}", None)
        if do is None:
            return [self.image(request)]
        return do(request, **(request.inputs or {}))

    def image(self, request):
        params = request.sampling_params
        size = (3, params.height or 8, params.width or 8)
        return torch.full(size, float(params.seed % 4096), device=self.device)

    # --- waiting ----------------------------------------------------------------------------------

    def do_gate(self, request, gate):
        """Wait until somebody writes to a named pipe."""
        Path(gate).read_bytes()
        return [self.image(request)]

    def echo(self, value):
        return value

    def pass_gate(self, gate):
        Path(gate).read_bytes()
        return "passed"

    def pid(self):
        return os.getpid()

    def do_brief(self, request):
        """Take a millisecond, and answer with the request's own number."""
        time.sleep(0.001)
        return [{"seed": np.array([request.sampling_params.seed])}]

    # --- poison -----------------------------------------------------------------------------------

    def do_raise(self, request, what):
        raise POISONS[what]()

    def raise_(self, what):
        raise POISONS[what]()

    def do_keep(self, request, note, where, how):
        """Raise something that keeps 200 MB, and have the file ``note`` made when they are gone."""
        kept = self.heavy(where, note)
        if how == "attribute":
            raise Keeps("keeps them", kept)
        if how == "local":
            raise ValueError("keeps only its frames")
        if how == "hidden context":
            try:
                raise Keeps("keeps them", kept)
            except Keeps:
                raise ValueError("shows nothing of it") from None
        if how == "cause":
            try:
                raise Keeps("keeps them", kept)
            except Keeps as error:
                kept_error = error  # and the frame keeps the error that keeps the frame
                raise ValueError("shows it") from kept_error
        raise ExceptionGroup("has it inside", [Keeps("keeps them", kept)])

    def heavy(self, where, note):
        if where == "host":
            array = np.ones(200 << 20, dtype=np.uint8)
            weakref.finalize(array, Path(note).touch)
            return torch.from_numpy(array)
        tensor = torch.zeros(200 << 20, dtype=torch.uint8, device=self.device)
        weakref.finalize(tensor, Path(note).touch)
        return tensor

    def do_watched(self, request, note):
        """Make an output and have the file ``note`` made when its device memory is free."""
        image = self.image(request)
        weakref.finalize(image, Path(note).touch)
        return [{"image": image}]

    def do_payload(self, request, where):
        return [{"deep": [where]}]

    def do_stubborn(self, request, kind):
        return [{"deep": [self.image(request), Stubborn(kind)]}]

    def do_fragile(self, request, kind, also_at_home):
        return [{"deep": [self.image(request), Fragile(kind, also_at_home)]}]

    def do_garbage(self, request, what):
        return GARBAGE[what](self, request)

    def collect_garbage(self):
        gc.collect()

    # --- faults of the device ---------------------------------------------------------------------

    def set_faults(self, **fields):
        from sidestream.testing import sim

        for name, value in fields.items():
            setattr(sim.faults(0), name, value)

    def do_fault(self, request, reason):
        """Queue a kernel that fails, behind the ones that make the image."""
        from sidestream.testing import sim

        image = self.image(request)
        sim.fault(0, reason)
        return [image]

    def do_fault_and_wait(self, request, reason):
        from sidestream.testing import sim

        sim.fault(0, reason)
        return [self.image(request).sum().item()]

    def do_number(self, request):
        """Make a number that the forward itself has to wait for."""
        return [self.image(request).sum().item()]

    def fault(self, reason):
        from sidestream.testing import sim

        sim.fault(0, reason)
        sim.default_stream(0).mark()

    def do_silence(self, request):
        """Have the event that is recorded behind this forward never fire."""
        image = self.image(request)
        self.set_faults(next_event_never_fires=True)
        return [image]

    def do_scattered(self, request, spare_bytes):
        """Make an output whose copy needs more device memory than is left."""
        whole = torch.ones(2048, 2048, device=self.device)
        first = torch.ones(4, device=self.device)
        self.set_faults(memory_bytes=used_bytes() + spare_bytes)
        return [{"first": first, "part": whole[::2, ::2]}]

    def do_out_of_memory(self, request, spare_bytes):
        held = torch.ones(1024, 1024, device=self.device)
        self.set_faults(memory_bytes=used_bytes() + spare_bytes)
        return [held + held]

    def give_memory(self):
        self.set_faults(memory_bytes=16 << 30)

    def order(self, what, times):
        """Have the platform ``unsure`` fail."""
        import faults_platforms

        faults_platforms.orders[what] = times

    def is_stalled(self):
        """Tell whether the platform ``stalls`` has stalled a copy that it had begun."""
        import faults_platforms

        return faults_platforms.WatchedEvent.is_awaited

    def memory(self):
        return free_bytes()

    def hold_forwards(self, gate):
        """Let nothing more complete on the forwards' stream, until somebody opens the gate.

        By a thread: the one that takes calls may be waiting then.
        """
        from sidestream.testing import sim

        stream = sim.default_stream(0)
        stream.hold()

        def release():
            Path(gate).read_bytes()
            stream.release()

        threading.Thread(target=release, daemon=True).start()

    def threads(self):
        return sorted(thread.name for thread in threading.enumerate())


def free_bytes():
    from sidestream.testing import sim
    from sidestream.testing.sim.device import device_at

    sim.default_stream(0).synchronize()
    return device_at(0).memory_info[0]


def used_bytes():
    from sidestream.testing import sim

    return sim.faults(0).memory_bytes - free_bytes()


class BadLength(list):
    def __len__(self):
        raise ValueError("uncounted")


GARBAGE = {
    "None": lambda _p, _r: None,
    "a number": lambda _p, _r: 3,
    "text": lambda _p, _r: "an image",
    "a dict": lambda p, r: {"image": p.image(r)},
    "a generator": lambda p, r: (p.image(r) for _ in range(1)),
    "a tensor": lambda p, r: p.image(r)[None],
    "nothing": lambda _p, _r: [],
    "one too many": lambda p, r: [p.image(r), p.image(r)],
    "an uncountable list": lambda p, r: BadLength([p.image(r)]),
    "a None inside": lambda _p, _r: [None],
    "a lock inside": lambda _p, _r: [{"a": [threading.Lock()]}],
    "a meta tensor": lambda _p, _r: [torch.empty(3, device="meta")],
}


class PrivateFaulty(Faulty):
    outputs_are_private = True


class BatchFaulty(Faulty):
    """Shares forwards; the device fails in those that have a "break" among them."""

    supports_request_batch = True

    def forward(self, requests):
        return [super(BatchFaulty, self).forward([request])[0] for request in requests]

    def do_break(self, request):
        return self.do_fault(request, "a wire came loose")


class NoLoad:
    def forward(self, requests): ...


class LoadsNothing:
    @classmethod
    def load(cls, config):
        return None

    def forward(self, requests): ...


class LoadsAPoison(Faulty):
    @classmethod
    def load(cls, config):
        raise POISONS[config.options["what"]]()
