"""A pipeline in its worker: found by reference, loaded, and run with its device-side finish."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sidestream.config import PipelineConfig
from sidestream.errors import ConfigError, DeviceMemoryError, ExecutionError, RequestError
from sidestream.models.post_process import find_post_process
from sidestream.request import DiffusionRequest
from sidestream.transport.failure import describe_error
from sidestream.worker.running import ForwardStopped

if TYPE_CHECKING:
    import torch

_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Payload:
    """What a forward made of one request."""

    tree: Any
    #: True: nobody will write to these tensors again.
    is_private: bool = False
    #: Why this request failed, where others of its batch did not.
    error: RequestError | None = None


class LoadedPipeline:
    """A user's pipeline and the device half of its post-processing."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        found = find_post_process(pipeline)
        #: Key of the host half, for the consumer.
        self.post_process = None if found is None else found[0]
        self._finish = None if found is None else found[1].device
        #: Whether requests may share a forward.
        self.supports_request_batch = bool(getattr(pipeline, "supports_request_batch", False))
        self._outputs_are_private = bool(getattr(pipeline, "outputs_are_private", False))

    @classmethod
    def load(cls, reference: str, config: PipelineConfig) -> LoadedPipeline:
        """Import ``package.module:Class`` and load it.

        Raises:
            ConfigError: The reference names nothing that can be loaded.
        """
        import torch

        factory = resolve(reference)
        for method in ("load", "forward"):
            if not callable(getattr(factory, method, None)):
                raise ConfigError("pipeline", reference, f"a class with a method {method!r}")
        with torch.no_grad():
            pipeline = factory.load(config)
        if not callable(getattr(pipeline, "forward", None)):
            raise ConfigError(
                "pipeline",
                reference,
                f"a class whose load() returns a pipeline, not {type(pipeline).__name__}",
            )
        return cls(pipeline)

    def forward(self, requests: Sequence[DiffusionRequest]) -> list[Payload]:
        """Run one forward and queue the device part of post-processing behind it.

        Raises:
            ExecutionError: The pipeline raised, or did not return one payload for each request.
            DeviceMemoryError: The device had too little memory.
            ForwardStopped: Its requests were aborted, and it found out between two steps.
        """
        import torch

        request_id = requests[0].request_id if len(requests) == 1 else None
        try:
            with torch.no_grad():
                trees = self.pipeline.forward(requests)
                self._check(trees, requests)
                return [
                    self.finished(tree, request)
                    for tree, request in zip(trees, requests, strict=True)
                ]
        except (RequestError, ForwardStopped):
            raise
        except BaseException as error:
            raise execution_error(error, request_id) from error

    def _check(self, trees: Any, requests: Sequence[DiffusionRequest]) -> None:
        if not isinstance(trees, Sequence) or isinstance(trees, str | bytes):
            raise TypeError(
                f"{type(self.pipeline).__name__}.forward returned {type(trees).__name__}; "
                "it must return a sequence with one payload for each request"
            )
        if len(trees) != len(requests):
            raise ValueError(
                f"{type(self.pipeline).__name__}.forward returned {len(trees)} payload(s) for "
                f"{len(requests)} request(s)"
            )

    def finished(self, tree: Any, request: DiffusionRequest) -> Payload:
        """Queue the device part of post-processing behind what made ``tree``."""
        if isinstance(tree, BaseException):
            # In a member's place: that request failed, the others of its batch did not.
            if isinstance(tree, RequestError):
                return Payload(None, error=tree)
            error = execution_error(tree, request.request_id)
            error.__cause__ = tree
            return Payload(None, error=error)
        if self._finish is None:
            return Payload(tree, self._outputs_are_private)
        finished = self._finish(tree, request.sampling_params)
        # A finish either makes new tensors or hands back what it was given.
        return Payload(finished, self._outputs_are_private or finished is not tree)


def resolve(reference: str) -> Any:
    """Import ``package.module:Class``.

    Raises:
        ConfigError: The module has no such attribute; an import error is its own message.
    """
    module_name, _, attribute = reference.partition(":")
    value: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise ConfigError("pipeline", reference, f"a name that module {module_name!r} defines")
        value = getattr(value, name)
    return value


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into the dtype; ``auto`` is bfloat16 on devices, float32 on the CPU."""
    import torch

    if dtype == "auto":
        return torch.float32 if device.type in ("cpu", "sim") else torch.bfloat16
    found = getattr(torch, dtype)
    assert dtype in _DTYPES
    assert isinstance(found, torch.dtype)
    return found


def execution_error(error: BaseException, request_id: str | None) -> RequestError:
    """Say which request, or that a forward, ended by what a pipeline raised."""
    import torch

    of_what = f"Request {request_id!r}" if request_id is not None else "The forward"
    said = describe_error(error)
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceMemoryError(
            f"{of_what} needs more device memory than is free: {said}", request_id=request_id
        )
    return ExecutionError(f"{of_what} failed in the pipeline: {said}", request_id=request_id)
