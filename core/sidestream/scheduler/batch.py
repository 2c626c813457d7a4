"""Which requests may share a forward."""

from __future__ import annotations

from collections.abc import Hashable

from sidestream.request import DiffusionRequest

#: Equal for all members of a batch. What one call of a pipeline takes once, not once a prompt.
_SHARED = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "num_outputs_per_prompt",
)


def batch_key(request: DiffusionRequest) -> Hashable | None:
    """Give a key that requests which may share a forward have in common; None: runs alone.

    Prompts, negative prompts and seeds may differ. ``inputs`` and ``extra`` are arguments of one
    whole call of a pipeline, so a request that has any runs alone. Where results part ways only
    after the decoder (uint8 or float), requests may share a forward; latents skip the decoder.
    """
    params = request.sampling_params
    if request.inputs or params.extra:
        return None
    return (
        *(getattr(params, name) for name in _SHARED),
        params.negative_prompt is None,
        params.output_type == "latent",
    )
