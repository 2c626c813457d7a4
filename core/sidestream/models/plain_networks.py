"""Networks that only read their weights as they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

#: Attributes by which hooks are known: accelerate's move weights, those of diffusers move or cast
#: them.
_ACCELERATE: Final = "_hf_hook"
_DIFFUSERS: Final = "_diffusers_hook"


def are_plain(*networks: nn.Module | None) -> bool:
    """Tell whether networks may run on one stream while others of a pipeline run on another.

    Not where hooks move or cast weights (offload, layerwise casting), where a library quantized
    them, whose kernels may have a stream and a workspace of their own, or where they are compiled,
    whose graphs may write each result to one place. Looks at every module, for half a
    microsecond each.
    """
    return all(network is None or _is_plain(network) for network in networks)


def _is_plain(network: nn.Module) -> bool:
    if getattr(network, "hf_quantizer", None) is not None:
        return False
    # By hand: ``modules()`` takes longer than all that is asked of what it gives.
    found = {network}
    modules = [network]
    for module in modules:  # which grows meanwhile
        held = module.__dict__
        inner: dict[str, nn.Module | None] = held["_modules"]
        if (
            held.get("_compiled_call_impl") is not None
            or _ACCELERATE in held
            or _DIFFUSERS in held
            or "_orig_mod" in inner
        ):
            return False
        for one in inner.values():
            if one is not None and one not in found:
                found.add(one)
                modules.append(one)
    return True
