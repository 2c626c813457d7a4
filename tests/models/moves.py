"""Count what moves between the host and a device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Moves(TorchDispatchMode):
    """Count copies between the host and a device; on CUDA each of them would wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten._to_copy.default else args[1]
            self.count += source.device.type != result.device.type
        return result
