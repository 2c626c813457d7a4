"""What ``pipeline_options`` can ask of a pipeline made of diffusers' parts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from sidestream.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig

_OFFLOADS: Final = ("model", "sequential", "group")
_DTYPES: Final = ("float32", "float16", "bfloat16")
_LORA_NAMES: Final = frozenset({"path", "weight_name", "scale"})


@dataclass(frozen=True, kw_only=True)
class DiffusersOptions:
    """Each does nothing unless it is given.

    Raises:
        ConfigError: A value is not possible.
    """

    #: Dtypes of single components, by name: ``{"vae": "float32"}``.
    component_dtypes: Mapping[str, str] = field(default_factory=dict)
    #: ``"float8"``: the denoiser's weights are stored so and cast for each layer. A mapping:
    #: the arguments of diffusers' ``PipelineQuantizationConfig``.
    quantization: str | Mapping[str, Any] | None = None
    #: True, or the arguments of ``torch.compile`` for the denoiser's repeated blocks.
    compile: bool | Mapping[str, Any] = False
    #: A name that ``set_attention_backend`` of diffusers knows.
    attention_backend: str | None = None
    #: Keeps weights on the host: of a ``"model"`` or of a ``"group"`` of layers until it runs,
    #: ``"sequential"``: of each layer.
    cpu_offload: str | None = None
    #: Decode large images and videos in tiles.
    vae_tiling: bool = False
    #: Folders or files of LoRA weights, or ``{"path": ..., "weight_name": ..., "scale": ...}``.
    lora: Sequence[str | Path | Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        for name, dtype in self.component_dtypes.items():
            if dtype not in _DTYPES:
                allowed = ", ".join(map(repr, _DTYPES))
                raise ConfigError(f"pipeline_options: component_dtypes[{name!r}]", dtype, allowed)
        if isinstance(self.quantization, str) and self.quantization != "float8":
            raise ConfigError(
                "pipeline_options: quantization", self.quantization, "'float8' or a mapping"
            )
        if self.cpu_offload not in (None, *_OFFLOADS):
            allowed = ", ".join(map(repr, _OFFLOADS))
            raise ConfigError("pipeline_options: cpu_offload", self.cpu_offload, allowed)
        if isinstance(self.lora, str | Path | Mapping):
            object.__setattr__(self, "lora", (self.lora,))
        for one in self.lora:
            if isinstance(one, Mapping) and not {"path"} <= one.keys() <= _LORA_NAMES:
                raise ConfigError("pipeline_options: lora", one, "path, weight_name and scale")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Take ``PipelineConfig.options``.

        Raises:
            ConfigError: A name or a value is not possible.
        """
        known = [one.name for one in dataclasses.fields(cls)]
        unknown = {name: value for name, value in options.items() if name not in known}
        if unknown:
            raise ConfigError("pipeline_options", unknown, ", ".join(known))
        return cls(**options)

    @contextmanager
    def loading(self, config: PipelineConfig) -> Iterator[dict[str, Any]]:
        """Give the arguments of ``from_pretrained``, which has to run inside, for some options.

        Raises:
            ConfigError, MissingDependencyError: The quantization is not possible.
        """
        dtypes = {name: getattr(torch, dtype) for name, dtype in self.component_dtypes.items()}
        arguments: dict[str, Any] = {
            "dtype": {**dtypes, "default": config.dtype} if dtypes else config.dtype
        }
        if self.quantization is not None and config.world_size > 1:
            allowed = "None with tensor parallelism: quantized weights can't be divided"
            raise ConfigError("pipeline_options: quantization", self.quantization, allowed)
        if not isinstance(self.quantization, Mapping):
            yield arguments
            return
        from diffusers import PipelineQuantizationConfig

        with _said_by_the_library("quantization", self.quantization):
            quantization = PipelineQuantizationConfig(**self.quantization)
            yield {**arguments, "quantization_config": quantization}

    def apply(self, pipeline: Any, config: PipelineConfig) -> None:
        """Bring a loaded pipeline onto the device, as the options say.

        Raises:
            ConfigError: The pipeline can't do what an option asks.
            MissingDependencyError: An option needs a package that is not installed.
        """
        for index, one in enumerate(self.lora):
            _add_lora(pipeline, f"lora{index}", one)
        if self.lora:
            scales = [
                one.get("scale", 1.0) if isinstance(one, Mapping) else 1.0 for one in self.lora
            ]
            pipeline.set_adapters([f"lora{index}" for index in range(len(scales))], scales)
        for denoiser in denoisers(pipeline):
            if self.quantization == "float8":
                denoiser.enable_layerwise_casting(torch.float8_e4m3fn, config.dtype)
            if self.attention_backend is not None:
                with _said_by_the_library("attention_backend", self.attention_backend):
                    denoiser.set_attention_backend(self.attention_backend)
            if self.compile is not False:
                arguments = self.compile if isinstance(self.compile, Mapping) else {}
                with _said_by_the_library("compile", self.compile):
                    denoiser.compile_repeated_blocks(**arguments)
        if self.vae_tiling:
            with _said_by_the_library("vae_tiling", True):
                pipeline.vae.enable_tiling()
        self._place(pipeline, config.device)

    def _place(self, pipeline: Any, device: torch.device) -> None:
        if self.cpu_offload is None:
            pipeline.to(device)
            return
        with _said_by_the_library("cpu_offload", self.cpu_offload):
            if device.type == "cpu":
                raise ValueError("the device is the CPU already")
            if self.cpu_offload == "model":
                pipeline.enable_model_cpu_offload(device=device)
            elif self.cpu_offload == "sequential":
                pipeline.enable_sequential_cpu_offload(device=device)
            else:
                pipeline.enable_group_offload(device, offload_type="leaf_level")


def denoisers(pipeline: Any) -> list[Any]:
    """Give the networks that a pipeline runs at every step."""
    names = ("transformer", "transformer_2", "unet")
    found = [getattr(pipeline, name, None) for name in names]
    return [model for model in found if model is not None]


def _add_lora(pipeline: Any, name: str, lora: str | Path | Mapping[str, Any]) -> None:
    if importlib.util.find_spec("peft") is None:
        raise MissingDependencyError("peft", "LoRA weights", 'pip install "sidestream[lora]"')
    given = dict(lora) if isinstance(lora, Mapping) else {"path": lora}
    path = Path(given["path"]).expanduser()
    if not path.exists():
        raise ConfigError("pipeline_options: lora", str(path), "a folder or a file that exists")
    folder, file = (path, given.get("weight_name")) if path.is_dir() else (path.parent, path.name)
    with _said_by_the_library("lora", str(path)):
        pipeline.load_lora_weights(
            str(folder), weight_name=file, adapter_name=name, local_files_only=True
        )


@contextmanager
def _said_by_the_library(option: str, value: object) -> Iterator[None]:
    """Turn what diffusers says against an option into an error that names the option."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            error.name or "a package",
            f"pipeline_options: {option}={value!r}",
            f"what the library says: {error}",
        ) from error
    except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"pipeline_options: {option}", value, f"what the pipeline can do ({error})"
        ) from error
