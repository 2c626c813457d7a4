"""Device-to-host copies for a script: no engine, no worker."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sidestream.platforms.platform import load_platform
from sidestream.worker.output_thread import AsyncOutputThread
from sidestream.worker.sink import HostSink

if TYPE_CHECKING:
    import torch

# One output thread a device: a side stream and its thread are worth keeping between calls. This is
# the one piece of process-wide state here; it holds no tensors and ends with the process.
_threads: dict[torch.device, AsyncOutputThread] = {}
# Guards the making of a device's thread.
_lock = threading.Lock()


def to_host(tree: Any) -> Future[Any]:
    """Copy a tensor, or a tree of them, to page-locked host memory in the background.

    Ordered behind what the calling thread queued on its current stream; the tensors may be
    overwritten as soon as this returns. Host tensors are copied too. The future gives the same
    tree on the host.

    Raises:
        PackingError: A leaf can't be copied; names it.
        PlatformNotFoundError: No plugin serves the tensor's device.
    """
    device = _device_of(tree)
    with _lock:
        thread = _threads.get(device)
        if thread is None:
            platform = load_platform(device)
            thread = AsyncOutputThread(platform, HostSink(platform, device), device=device)
            _threads[device] = thread.start()
    return thread.submit("to_host", tree)


def _device_of(tree: Any) -> torch.device:
    import torch

    found = [leaf.device for leaf in _tensors(tree) if leaf.device.type != "cpu"]
    if not found:
        return torch.device("cpu")
    if any(device != found[0] for device in found):
        raise ValueError(f"to_host() takes the tensors of one device; got {found[0]} and others.")
    return found[0]


def _tensors(tree: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
