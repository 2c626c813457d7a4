"""Pipelines of tensor-parallel groups: each step's result is a sum over all ranks.

A request says in its prompt what it wants. "raise RANK", "late RANK": that rank fails before or
behind the last sum. "gated FOLDER" (see ``abort_pipes``) holds rank 0 behind each step, "gated
FOLDER of RANK" holds that rank before the first.
"""

from __future__ import annotations

import os
import signal
import weakref

import torch
from abort_pipes import pause
from sidestream_pipes import Gradient


class Summed(Gradient):
    """An image of the seed plus, for each step, the sum of all ranks' numbers, from 1 on."""

    on_step = None

    def __init__(self):
        self.events = []
        self.output = lambda: None

    def forward(self, requests):
        words = requests[0].prompt.split()
        steps = requests[0].sampling_params.num_inference_steps or 1
        self.raise_if(words, "raise")
        if self.is_named(words, "of"):
            pause(requests[0].prompt, "forward")
        if "on-device" in words:
            torch.distributed.all_reduce(torch.ones(1, device=self.device))
        total = torch.zeros(())
        for step in range(1, steps + 1):
            share = torch.tensor(self.config.rank + 1.0)
            torch.distributed.all_reduce(share)
            total += share
            if "of" not in words and self.config.rank == 0:
                pause(requests[0].prompt, step)
            self.events.append(step)
            self.on_step(step)
        self.raise_if(words, "late")
        outputs = super().forward(requests)
        for output in outputs:
            output += total.to(output.device)
        self.output = weakref.ref(outputs[0])
        return outputs

    def is_named(self, words, word):
        return word in words and int(words[words.index(word) + 1]) == self.config.rank

    def raise_if(self, words, word):
        if self.is_named(words, word) or f"{word}-all" in words:
            raise ValueError(f"no luck on {self.config.rank}")

    # --- what tests call -------------------------------------------------------------------------

    def take_events(self):
        events, self.events = self.events, []
        return events

    def add_up(self, number):
        """Do a call together with the other ranks."""
        share = torch.tensor(number * (self.config.rank + 1))
        torch.distributed.all_reduce(share)
        return int(share)

    def world(self):
        return self.config.rank, self.config.world_size

    def holds_output(self):
        return self.output() is not None


class SummedTogether(Summed):
    """The same for several requests at a time; an event is how many."""

    supports_request_batch = True

    def forward(self, requests):
        self.events.append(len(requests))
        return super().forward(requests)


class FailsToLoad(Summed):
    """Rank 1 fails while rank 0 waits for it in a sum."""

    @classmethod
    def load(cls, config):
        if config.rank == 1:
            if config.options["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such weight")
        torch.distributed.all_reduce(torch.zeros(1))
        return super().load(config)
