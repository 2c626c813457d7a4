"""Pipelines for tests; loaded by reference, here and in worker processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch


class Gradient:
    """The pipeline of the README: one flat image a request, its value the seed."""

    @classmethod
    def load(cls, config):
        self = cls()
        self.config = config
        self.device = config.device
        return self

    def forward(self, requests):
        return [
            torch.full(
                (3, r.sampling_params.height or 8, r.sampling_params.width or 8),
                float(r.sampling_params.seed),
                device=self.device,
            )
            for r in requests
        ]

    # --- what tests call -------------------------------------------------------------------------

    def pid(self):
        return os.getpid()

    def options(self):
        return dict(self.config.options)

    def dtype(self):
        return str(self.config.dtype)

    def echo(self, value):
        return value

    def fail(self, text):
        raise ValueError(text)

    def hold_copies(self):
        """Let nothing more complete on the side streams of the simulated accelerator."""
        from sidestream.testing import sim

        for stream in sim.side_streams(0):
            stream.hold()

    def release_copies(self):
        from sidestream.testing import sim

        for stream in sim.side_streams(0):
            stream.release()

    def finish_forwards(self):
        """Wait until the forwards' stream has nothing left to do."""
        from sidestream.testing import sim

        sim.default_stream(0).synchronize()

    def copies(self):
        from sidestream.testing import sim

        return [(c.nbytes, c.pinned, c.stream) for c in sim.copies()]

    def clear_copies(self):
        from sidestream.testing import sim

        sim.clear_copies()


class OneBuffer(Gradient):
    """Keeps one output buffer and overwrites it in the next forward."""

    def forward(self, requests):
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(3, 64, 64, device=self.device)
        self.buffer.fill_(float(requests[0].sampling_params.seed))
        return [self.buffer]


class HostBuffer(Gradient):
    """The same on the host: an array that the next forward overwrites."""

    def forward(self, requests):
        import numpy as np

        if not hasattr(self, "buffer"):
            self.buffer = np.empty((64, 64, 3), dtype=np.float32)
        self.buffer.fill(float(requests[0].sampling_params.seed))
        return [{"image": self.buffer, "seed": requests[0].sampling_params.seed}]


class Echo(Gradient):
    """Gives back what came in."""

    def forward(self, requests):
        return [{"prompt": r.prompt, "inputs": dict(r.inputs or {})} for r in requests]


class Failing(Gradient):
    """Does what its prompt says."""

    def forward(self, requests):
        prompt = requests[0].prompt
        if prompt == "value":
            raise ValueError("no such color")
        if prompt == "exit":
            raise SystemExit(3)
        if prompt == "lock":
            import threading

            error = RuntimeError("holds a lock")
            error.lock = threading.Lock()
            raise error
        if prompt == "memory":
            raise torch.OutOfMemoryError("out of memory, tried to allocate 80 GiB")
        if prompt == "none":
            return [None]
        if prompt == "two":
            return [1, 2]
        if prompt == "lambda":
            return [{"frames": [torch.zeros(3), lambda: None]}]
        if prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "sleep":
            time.sleep(30)
        return super().forward(requests)


class Chameleon:
    """Is whichever of the plain pipelines above a test names: a worker's start costs seconds."""

    @classmethod
    def load(cls, config):
        self = cls()
        self.config = config
        self.become("Gradient")
        return self

    def become(self, name):
        self.current = globals()[name].load(self.config)

    def forward(self, requests):
        return self.current.forward(requests)

    def __getattr__(self, name):
        return getattr(self.current, name)


class LoadRaises:
    @classmethod
    def load(cls, config):
        print("looking for the weights")
        import sys

        print("weights are not there", file=sys.stderr)
        raise FileNotFoundError("no weights at /nowhere")

    def forward(self, requests): ...


class LoadExits(LoadRaises):
    @classmethod
    def load(cls, config):
        import sys

        print("last words", file=sys.stderr, flush=True)
        os._exit(9)


class LoadHangs(LoadRaises):
    @classmethod
    def load(cls, config):
        time.sleep(600)


class NoForward:
    @classmethod
    def load(cls, config):
        return cls()


class Batching(Gradient):
    """Runs requests together, and remembers with whom each one ran.

    Prompts: "raise" fails the whole batch, "member" only itself, "none" gives no payload.
    """

    supports_request_batch = True

    def __init__(self):
        self.batches = []

    def forward(self, requests):
        self.batches.append([r.request_id for r in requests])
        if any(r.prompt == "raise" for r in requests):
            raise ValueError("one of you is bad")
        fates = {"member": ValueError("only me"), "none": None}
        outputs = super().forward(requests)
        return [fates.get(r.prompt, output) for r, output in zip(requests, outputs, strict=True)]

    def seen(self):
        batches, self.batches = self.batches, []
        return batches


class Stepping(Batching):
    """Denoises in steps; each waits for a word from the test if the prompt says "gated"."""

    on_step = None

    def forward(self, requests):
        for step in range(requests[0].sampling_params.num_inference_steps):
            if requests[0].prompt == "gated":
                # A named pipe a step: opening it waits for the test to open the other end.
                Path(self.config.options["gates"], str(step + 1)).read_text()
            if self.on_step is not None:
                self.on_step(step + 1)
        return super().forward(requests)


class Mortal(Gradient):
    """Kills its worker as its prompt says, once or always; counts on disk how often it ran.

    "die" always, "die-once" the first time, anything else never. ``options["log"]`` is a file that
    gets a line for each forward: process, prompt and seed.
    """

    supports_request_batch = True

    def forward(self, requests):
        with open(self.config.options["log"], "a") as log:
            for r in requests:
                print(os.getpid(), r.prompt, r.sampling_params.seed, file=log)
        log_text = Path(self.config.options["log"]).read_text()
        for r in requests:
            if r.prompt == "die" or (r.prompt == "die-once" and log_text.count("die-once") == 1):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(requests)


class LoadDiesLater(Gradient):
    """Loads once; a second load fails."""

    @classmethod
    def load(cls, config):
        with open(config.options["log"], "a+") as log:
            log.seek(0)
            if log.read():
                raise OSError("the weights are gone")
            print("loaded", file=log)
        return super().load(config)

    def forward(self, requests):
        os.kill(os.getpid(), signal.SIGKILL)
