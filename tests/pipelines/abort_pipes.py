"""Pipelines that stop wherever a test wants them to; for aborts, deadlines and hung workers.

A request says in its prompt what it wants. "gated FOLDER": at each gate of the forward write where
it is into FOLDER/at, then wait for somebody to write to FOLDER/go.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
from sidestream_pipes import Gradient


def pause(prompt, where):
    """Wait at a gate, if the prompt names one."""
    words = prompt.split()
    if "gated" in words:
        folder = Path(words[words.index("gated") + 1])
        (folder / "at").write_text(f"{where}\n")
        (folder / "go").read_text()


class Steps(Gradient):
    """Denoises in steps, or not at all; remembers what it did.

    "guarded" and "stubborn" catch what a step's end raises, as ``Exception`` or whatever it is;
    "raise" fails behind the last step.
    """

    supports_request_batch = True
    on_step = None

    def __init__(self):
        self.events = []
        self.latents = lambda: None

    def forward(self, requests):
        prompt = requests[0].prompt
        self.events.append([r.request_id for r in requests])
        latents = torch.ones(1 << 18, device=self.device)
        self.latents = weakref.ref(latents)
        steps = requests[0].sampling_params.num_inference_steps
        if steps is None:
            pause(prompt, "forward")
        for step in range(1, (steps or 0) + 1):
            pause(prompt, step)
            latents = latents * 1.5
            self.latents = weakref.ref(latents)
            self.events.append(step)
            self.end_step(prompt, step)
        if any("raise" in r.prompt for r in requests):
            raise ValueError("one of you is bad")
        self.events.append("decode")
        return super().forward(requests)

    def end_step(self, prompt, step):
        try:
            self.on_step(step)
        except Exception:
            if "guarded" not in prompt:
                raise
        except BaseException:
            if "stubborn" not in prompt:
                raise

    # --- what tests call -------------------------------------------------------------------------

    def take_events(self):
        events, self.events = self.events, []
        return events

    def holds_latents(self):
        return self.latents() is not None

    def hold_copies_at(self, prompt):
        """Hold the copies until the gate opens, also while no call gets through to here."""
        self.hold_copies()

        def release():
            pause(prompt, "copies")
            self.release_copies()

        threading.Thread(target=release, daemon=True).start()

    def nap(self, seconds):
        time.sleep(seconds)

    def is_copying(self):
        """Tell whether the output thread waits for a copy, on a side stream that the test holds."""
        from sidestream.testing import sim

        frames = sys._current_frames()
        for thread in threading.enumerate():
            frame = frames.get(thread.ident) if thread.name == "sidestream-output" else None
            while frame is not None:
                if frame.f_code is sim.SimEvent.wait.__code__:
                    return True
                frame = frame.f_back
        return False

    def free_bytes(self):
        from sidestream.testing import sim

        return sim.memory_info(self.device)[0]


class HangsOnce(Steps):
    """Waits for ever in the first forward of all its workers, if the prompt says "hang"."""

    def forward(self, requests):
        if "hang" in requests[0].prompt:
            marker = Path(self.config.options["marker"])
            if not marker.exists():
                marker.touch()
                signal.pause()
        return super().forward(requests)
