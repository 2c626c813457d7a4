"""Plugins that pass everything on to the simulated accelerator, but for one thing that is wrong.

Named by ``SIDESTREAM_PLUGINS=<name>=faults_platforms:<name>``.
"""

from __future__ import annotations

import dataclasses
import threading

from sidestream.errors import PlatformError
from sidestream.platforms.hookspecs import hookimpl
from sidestream.testing import sim

#: How often each thing shall still go wrong; tests set it in the process of the worker.
orders = {
    "enter raises": 0,
    "wait raises": 0,
    "wait answers False": 0,
    "wait_event raises": 0,
    "join raises": 0,
    "join forgets to wait": 0,
    "join forgets the memory": 0,
    "stall": 0,
}


def _is_ordered(what):
    is_ordered = orders[what] > 0
    orders[what] -= is_ordered
    return is_ordered


class Relay:
    name = ""

    @hookimpl
    def probe(self):
        return dataclasses.replace(sim.probe(), name=self.name)

    @hookimpl
    def set_device(self, device):
        return sim.set_device(device)

    @hookimpl
    def side_stream(self, device, priority):
        return sim.side_stream(device, priority)

    @hookimpl
    def record_device_event(self, device, timing):
        return sim.record_device_event(device, timing)

    @hookimpl
    def synchronize_device(self, device):
        return sim.synchronize_device(device)

    @hookimpl
    def check_device(self, device):
        return sim.check_device(device)

    @hookimpl
    def pin_host_memory(self, device, address, nbytes):
        return sim.pin_host_memory(device, address, nbytes)

    @hookimpl
    def pinned_buffer(self, device, nbytes):
        return sim.pinned_buffer(device, nbytes)


class RelayStream:
    """A side stream that passes everything on."""

    queues_freely = True

    def __init__(self, stream):
        self.stream = stream

    def wait_event(self, event):
        self.stream.wait_event(event)

    def record_event(self, timing=False):
        return self.stream.record_event(timing)

    def synchronize(self):
        self.stream.synchronize()

    def __enter__(self):
        self.stream.__enter__()
        return self

    def __exit__(self, *exc):
        self.stream.__exit__(*exc)


# --- refused at start -----------------------------------------------------------------------------


class ForeignEvent:
    """An event, but none that the streams of this platform know."""

    def query(self):
        return True

    def wait(self, timeout_s=None):
        return True

    def elapsed_s(self, earlier):
        return 0.0


class GivesForeignEvents(Relay):
    name = "gives_foreign_events"

    @hookimpl
    def record_device_event(self, device, timing):
        return ForeignEvent()


class AcceptingStream(RelayStream):
    def wait_event(self, event):
        if isinstance(event, sim.SimEvent):
            super().wait_event(event)


class AcceptsForeignEvents(Relay):
    name = "accepts_foreign_events"

    @hookimpl
    def side_stream(self, device, priority):
        return AcceptingStream(sim.side_stream(device, priority))


class HastyStream(RelayStream):
    """Forgets to wait; the work that it should wait for comes after the copy, every time."""

    def wait_event(self, event):
        if not isinstance(event, sim.SimEvent):
            raise PlatformError("not an event of this platform", platform="skips_waits")

    def record_event(self, timing=False):
        copied = self.stream.record_event(timing)
        assert copied.wait(30)
        sim.default_stream().release()
        return copied


class SkipsWaits(Relay):
    name = "skips_waits"

    @hookimpl
    def side_stream(self, device, priority):
        return HastyStream(sim.side_stream(device, priority))

    @hookimpl
    def pinned_buffer(self, device, nbytes):
        sim.default_stream().hold()  # the last call before the work is queued
        return sim.pinned_buffer(device, nbytes)


class NoStreams(Relay):
    name = "no_streams"

    @hookimpl
    def side_stream(self, device, priority):
        raise RuntimeError("no stream is left")


# --- fails when it is told to ---------------------------------------------------------------------


class UnsureEvent:
    """An event whose wait fails on order, with something that no hook specification mentions."""

    def __init__(self, event):
        self.event = event

    def query(self):
        return self.event.query()

    def wait(self, timeout_s=None):
        if _is_ordered("wait raises"):
            raise OSError("the driver's pipe is broken")
        return not _is_ordered("wait answers False") and self.event.wait(timeout_s)

    def elapsed_s(self, earlier):
        return self.event.elapsed_s(earlier.event)


class UnsureStream(RelayStream):
    def wait_event(self, event):
        if not isinstance(event, UnsureEvent):
            raise PlatformError("not an event of this platform", platform="unsure")
        if _is_ordered("wait_event raises"):
            raise TypeError("an event is required, got an event")
        super().wait_event(event.event)

    def record_event(self, timing=False):
        return UnsureEvent(super().record_event(timing))

    def __enter__(self):
        if _is_ordered("enter raises"):
            raise OSError("the stream can't be made current")
        return super().__enter__()


class Unsure(Relay):
    name = "unsure"

    @hookimpl
    def side_stream(self, device, priority):
        return UnsureStream(sim.side_stream(device, priority))

    @hookimpl
    def record_device_event(self, device, timing):
        return UnsureEvent(sim.record_device_event(device, timing))


class JoinableStream(RelayStream):
    """Can be joined, and does that wrong on order."""

    def join_current(self, tensors):
        if _is_ordered("join raises"):
            sim.default_stream().release()
            raise OSError("the driver's pipe is broken")
        if _is_ordered("join forgets to wait"):
            return
        self.stream.join_current([] if _is_ordered("join forgets the memory") else tensors)


class Joinable(Relay):
    name = "joinable"

    @hookimpl
    def side_stream(self, device, priority):
        return JoinableStream(sim.side_stream(device, priority))


# --- stalls a copy when it is told to -------------------------------------------------------------


class WatchedEvent:
    """An event of a stalled copy's end; notes that somebody has come so far as to wait for it."""

    #: Whether anybody has.
    is_awaited = False

    def __init__(self, event):
        self.event = event

    def query(self):
        return self.event.query()

    def wait(self, timeout_s=None):
        WatchedEvent.is_awaited = True
        return self.event.wait(timeout_s)

    def elapsed_s(self, earlier):
        return self.event.elapsed_s(earlier)


class StallingStream(RelayStream):
    """Begins a copy and never gets on with it, until the device fails."""

    current = None

    def __enter__(self):
        StallingStream.current, self.records = self, 0
        self.thread = threading.get_ident()
        return super().__enter__()

    def __exit__(self, *exc):
        StallingStream.current = None
        super().__exit__(*exc)

    def record(self, event):
        self.records += 1
        if self.records == 2:
            return WatchedEvent(event) if self.is_stalled else event
        self.is_stalled = _is_ordered("stall")
        if self.is_stalled:
            self.stream.await_event(sim.SimEvent(self.stream.device))  # which nobody reaches
        return event


class Stalls(Relay):
    name = "stalls"

    @hookimpl
    def side_stream(self, device, priority):
        return StallingStream(sim.side_stream(device, priority))

    @hookimpl
    def record_device_event(self, device, timing):
        stream = StallingStream.current
        event = sim.record_device_event(device, timing)
        is_inside = stream is not None and stream.thread == threading.get_ident()
        return stream.record(event) if is_inside else event


class InterruptedStream(RelayStream):
    """Ctrl-C in the middle of its first wait."""

    is_interrupted = False

    def wait_event(self, event):
        super().wait_event(event)
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt


class Interrupts(Relay):
    name = "sim"

    @hookimpl
    def side_stream(self, device, priority):
        return InterruptedStream(sim.side_stream(device, priority))


class HesitantStream(RelayStream):
    """May make the host wait, as far as anybody knows."""

    queues_freely = False


class Hesitates(Relay):
    name = "sim"

    @hookimpl
    def side_stream(self, device, priority):
        return HesitantStream(sim.side_stream(device, priority))


gives_foreign_events = GivesForeignEvents()
accepts_foreign_events = AcceptsForeignEvents()
skips_waits = SkipsWaits()
no_streams = NoStreams()
unsure = Unsure()
joinable = Joinable()
stalls = Stalls()
interrupts = Interrupts()
hesitates = Hesitates()
