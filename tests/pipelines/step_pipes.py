"""Pipelines that are stepped; for step mode.

A request's latents begin at its seed and grow by one a step. Prompts, besides those of
``abort_pipes.pause`` ("gated FOLDER", here before each denoising): "raise-prepare", "raise-2" (in
the denoising of step 2, alone or shared), "raise-decode", "hang-2", "kill-2", "kill-once-2" (the
first time; ``options["log"]`` counts), "hold-copies" (from the decoding on, what copies run on).
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from dataclasses import dataclass

import torch
from abort_pipes import pause
from sidestream_pipes import Gradient

from sidestream.models.step import StepState


@dataclass(kw_only=True, eq=False)
class Steps(StepState):
    latents: torch.Tensor


class Walk(Gradient):
    """Remembers what it did; makes a part of each ``extra["chunk"]`` steps."""

    def __init__(self):
        self.events = []
        self.latents = weakref.WeakSet()

    def forward(self, requests):
        outputs = []
        for request in requests:
            state = self.prepare_encode(request)
            while not state.done:
                self.step_scheduler(state, self.denoise_step(state))
            outputs.append(self.post_decode(state))
        return outputs

    def prepare_encode(self, request):
        self.events.append(("prepare", request.request_id))
        if "raise-prepare" in request.prompt:
            raise ValueError("no such prompt")
        params = request.sampling_params
        latents = torch.full(
            (3, params.height or 8, params.width or 8), float(params.seed), device=self.device
        )
        return self._keep(Steps(request, params.num_inference_steps or 3, latents=latents))

    def _keep(self, state):
        self.latents.add(state.latents)
        return state

    def denoise_step(self, state):
        self._misbehave(state)
        self.events.append(("step", state.request.request_id))
        return torch.ones_like(state.latents)

    def step_scheduler(self, state, noise_pred):
        state.latents = state.latents + noise_pred
        state.step += 1
        every = state.request.sampling_params.extra.get("chunk")
        if every and state.step % every == 0:
            state.chunk = state.latents.clone()
        self._keep(state)

    def post_decode(self, state):
        prompt = state.request.prompt
        self.events.append(("decode", state.request.request_id))
        if "raise-decode" in prompt:
            raise ValueError("can't be decoded")
        if "hold-copies" in prompt:
            self._hold_copies(prompt)
        return state.latents

    def _misbehave(self, state):
        prompt, step = state.request.prompt, state.step + 1
        pause(prompt, step)
        words = prompt.split()
        if f"raise-{step}" in words:
            raise ValueError(f"step {step} is bad")
        if f"hang-{step}" in words:
            signal.pause()
        if f"kill-{step}" in words or (f"kill-once-{step}" in words and self._is_first(prompt)):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, prompt):
        with open(self.config.options["log"], "a+") as log:
            log.seek(0)
            is_first = prompt not in log.read()
            print(prompt, file=log)
        return is_first

    def _hold_copies(self, prompt):
        from sidestream.testing import sim

        copying = sim.side_streams(0) if self._has_output_thread() else [sim.default_stream(0)]
        for stream in copying:
            stream.hold()

        def release():
            pause(prompt, "copies")
            for stream in copying:
                stream.release()

        threading.Thread(target=release, daemon=True).start()

    def _has_output_thread(self):
        return any(thread.name == "sidestream-output" for thread in threading.enumerate())

    # --- what tests call -------------------------------------------------------------------------

    def take_events(self):
        events, self.events = self.events, []
        return events

    def count_latents(self):
        return len(self.latents)

    def threads(self):
        return sorted(thread.name for thread in threading.enumerate())

    def wait_at(self, prompt):
        pause(prompt, "call")

    def hold_forwards(self):
        from sidestream.testing import sim

        sim.default_stream(0).hold()

    def release_forwards(self):
        from sidestream.testing import sim

        sim.default_stream(0).release()


class SharedWalk(Walk):
    """The same; requests of one size share forwards, unless their prompt says "alone"."""

    def share_key(self, state):
        if "alone" in state.request.prompt:
            return None
        return tuple(state.latents.shape)

    def denoise_steps(self, states):
        for state in states:
            self._misbehave(state)
        self.events.append(("steps", [state.request.request_id for state in states]))
        return list(torch.ones_like(torch.stack([state.latents for state in states])))


class Besides(SharedWalk):
    """The same, prepared as real pipelines are, on a stream of its own unless told "between".

    Copies its seed from the host, which blocks, and reads it back. Each step uses what preparing
    made, a tensor deep inside the state. Prompts: "break-prepare": the device fails in it;
    "fill-memory": there is none left; "gated-prepare": it stops at its gate in it; "kill-prepare":
    the worker dies (the first time); "hold-prepare": its last kernels don't run before the test
    releases side streams; "hold-once-1": nor those of its first step, ever (the first time).
    """

    def may_prepare_beside(self, request):
        return "between" not in request.prompt

    def prepare_encode(self, request):
        from sidestream.testing import sim

        state = super().prepare_encode(request)
        if "break-prepare" in request.prompt:
            sim.fault(0, "a kernel of the prompt's encoder", torch.sim.current_stream())
        if "fill-memory" in request.prompt:
            torch.empty(1 << 40, device=self.device)
        seed = torch.full(state.latents.shape, float(request.sampling_params.seed)).to(self.device)
        assert seed.flatten()[0].item() == request.sampling_params.seed
        ones = torch.ones(state.latents.shape).to(self.device)
        if "gated-prepare" in request.prompt:
            pause(request.prompt, "prepare")
        if "kill-prepare" in request.prompt and self._is_first(request.prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        stream = torch.sim.current_stream()
        if "hold-prepare" in request.prompt:
            stream.hold()
        state.latents = seed * 1
        state.prepared = {"one": [Inner(ones * 1)]}
        self.events.append(("prepared", stream.name))
        return self._keep(state)

    def _misbehave(self, state):
        super()._misbehave(state)
        prompt = state.request.prompt
        if f"hold-once-{state.step + 1}" in prompt and self._is_first(prompt):
            self.hold_forwards()

    def denoise_step(self, state):
        self._misbehave(state)
        self.events.append(("step", state.request.request_id))
        return state.prepared["one"][0].tensor * 1

    def denoise_steps(self, states):
        return [self.denoise_step(state) for state in states]

    def step_scheduler(self, state, noise_pred):
        super().step_scheduler(state, noise_pred)
        if state.done:
            del state.prepared  # while the device may still be in front of the first step


@dataclass
class Inner:
    tensor: torch.Tensor


class NoStages(Gradient):
    """Has a forward and nothing else."""
