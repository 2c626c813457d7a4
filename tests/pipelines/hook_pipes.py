"""Pipelines with a network whose weights hooks may move; for step mode on ``sim``."""

from __future__ import annotations

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from step_pipes import Besides

from sidestream.models.plain_networks import are_plain


class Hooked(Besides):
    """Prepared beside steps until there is a hook."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Identity()))

    def may_prepare_beside(self, request):
        return are_plain(self.network)

    # --- what tests call -------------------------------------------------------------------------

    def add_hook(self):
        add_hook_to_module(self.network[0][0], ModelHook())

    def remove_hook(self):
        remove_hook_from_module(self.network[0][0])
