"""Networks that only read their weights as they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

#: Attributes by which accelerate's hooks, which move weights, and those of diffusers, which move or
#: cast them, are known.
_HOOKS: Final = ("_hf_hook", "_diffusers_hook")


def are_plain(*networks: nn.Module | None) -> bool:
    """Tell whether networks may run on one stream while others of a pipeline run on another.

    Not where hooks move or cast weights (offload, layerwise casting), where a library quantized
    them, whose kernels may have a stream and a workspace of their own, or where they are compiled,
    whose graphs may write each result to one place. Looks at every module, for some microseconds
    each.
    """
    return all(network is None or _is_plain(network) for network in networks)


def _is_plain(network: nn.Module) -> bool:
    if getattr(network, "hf_quantizer", None) is not None:
        return False
    return not any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or any(name in vars(module) for name in _HOOKS)
        for module in network.modules()
    )
