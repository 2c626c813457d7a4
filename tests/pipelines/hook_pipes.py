"""Pipelines with a network whose weights hooks may move; for step mode on ``sim``."""

from __future__ import annotations

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from step_pipes import Besides

from sidestream.models.plain_networks import are_plain


class Looked(torch.nn.Sequential):
    """Counts how often somebody asks what it is."""

    looks = 0

    @property
    def hf_quantizer(self):
        self.looks += 1


class Hooked(Besides):
    """Prepared beside steps until there is a hook; ``extra["touch"]`` is called in each step."""

    prepares_alike = True

    def __init__(self):
        super().__init__()
        self.network = Looked(torch.nn.Sequential(torch.nn.Identity()))

    def may_prepare_beside(self, request):
        return are_plain(self.network)

    def denoise_step(self, state):
        state.request.sampling_params.extra.get("touch", id)(self)
        return super().denoise_step(state)

    # --- what tests call -------------------------------------------------------------------------

    def add_hook(self):
        add_hook_to_module(self.network[0][0], ModelHook())

    def remove_hook(self):
        remove_hook_from_module(self.network[0][0])

    def looks(self):
        return self.network.looks


class HooksAsItSteps(Hooked):
    """Adds a hook in each step, where ``Hooked`` adds none."""

    def denoise_step(self, state):
        self.add_hook()
        return super().denoise_step(state)
