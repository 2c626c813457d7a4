"""What the adapters of diffusers pipelines share: loading, and passing arguments by name."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import diffusers.utils.logging
import transformers.utils.logging

from sidestream.errors import ConfigError, InvalidRequestError
from sidestream.models.diffusers_options import DiffusersOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sidestream.config import PipelineConfig
    from sidestream.request import DiffusionRequest

PipelineT = TypeVar("PipelineT")

#: Arguments of a diffusers pipeline that an adapter sets from the request's own fields, or that
#: only a caller in the same process could give.
_RESERVED: Final = frozenset(
    {
        "self",
        "prompt",
        "negative_prompt",
        "height",
        "width",
        "num_frames",
        "num_inference_steps",
        "guidance_scale",
        "true_cfg_scale",
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "generator",
        "output_type",
        "return_dict",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
    }
)


def load_pretrained(
    pipeline_class: type[PipelineT], config: PipelineConfig, **components: Any
) -> PipelineT:
    """Load a diffusers pipeline from ``config.model`` onto the device; never from the network.

    ``components`` take the place of what the folder has under their names.

    Raises:
        ConfigError: There is no folder, or an option is not possible.
        MissingDependencyError: An option needs a package that is not installed.
    """
    if config.model is None:
        raise ConfigError("model", None, f"a checkpoint folder for {pipeline_class.__name__}")
    if config.world_size > 1 and "transformer" not in components:
        allowed = f"1 for {pipeline_class.__name__}: its adapter does not divide it among ranks"
        raise ConfigError("tensor_parallel_size", config.world_size, allowed)
    options = DiffusersOptions.of(config.options)
    with quiet_progress_bars():
        with options.loading(config) as arguments:
            pipeline: Any = pipeline_class.from_pretrained(  # type: ignore[attr-defined]
                config.model, local_files_only=True, **arguments, **components
            )
        options.apply(pipeline, config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline  # type: ignore[no-any-return]


@contextmanager
def quiet_progress_bars() -> Iterator[None]:
    """Keep diffusers and transformers from drawing progress bars; theirs is a global switch."""
    switches = [
        logging
        for logging in (diffusers.utils.logging, transformers.utils.logging)
        if logging.is_progress_bar_enabled()
    ]
    for logging in switches:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in switches:
            logging.enable_progress_bar()


def named_arguments(call: Callable[..., Any], request: DiffusionRequest) -> dict[str, Any]:
    """Collect the arguments that a request gives by the pipeline's own names.

    They come from ``request.inputs`` and ``sampling_params.extra``.

    Raises:
        InvalidRequestError: The pipeline has no such argument, or it is given twice or has a
            place of its own in the request.
    """
    inputs: Mapping[str, Any] = request.inputs or {}
    extra = request.sampling_params.extra
    accepted = sorted(inspect.signature(call).parameters.keys() - _RESERVED)
    for name in [*inputs, *extra]:
        if name in inputs and name in extra:
            why = "is given in both inputs and extra; give it once"
        elif name in _RESERVED:
            why = "can't be given by name; use the fields of DiffusionRequest and SamplingParams"
        elif name not in accepted:
            why = f"is not an argument of the pipeline; it takes {', '.join(accepted)}"
        else:
            continue
        raise InvalidRequestError(f"Argument {name!r} {why}.", request_id=request.request_id)
    return {**inputs, **extra}


def with_signature_defaults(
    call: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Add to ``arguments`` what ``call`` would take for those that are left out."""
    bound = inspect.signature(call).bind_partial(**arguments)
    bound.apply_defaults()
    return bound.arguments
