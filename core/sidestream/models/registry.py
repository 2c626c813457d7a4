"""Where a model is and which pipeline class runs it. Imports neither torch nor diffusers."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Adapters by the ``_class_name`` of a diffusers folder's ``model_index.json``.
_ADAPTERS: Final[Mapping[str, str]] = {
    "QwenImagePipeline": "sidestream.models.qwen_image:QwenImage",
    "HunyuanImage3Pipeline": "sidestream.models.hunyuan_image3:HunyuanImage3",
    "HeliosPipeline": "sidestream.models.helios:Helios",
    "WanPipeline": "sidestream.models.video:Wan",
    "LTXPipeline": "sidestream.models.video:LTX",
}
#: For every other class that diffusers has.
_ANY_ADAPTER: Final = "sidestream.models.any_diffusers:AnyDiffusers"
#: For a folder whose model is loaded by code in it, by its ``config.json``'s architecture.
_REMOTE_ADAPTERS: Final[Mapping[str, str]] = {
    "HunyuanImage3ForCausalMM": ("sidestream.models.hunyuan_image3_released:HunyuanImage3Released"),
}
#: Checkpoints that come with the package: each is a folder of that name in it.
_BUILT_IN: Final = ("digits",)
_BUILT_IN_FOLDER: Final = Path(__file__).parent / "checkpoints"

#: What a checkpoint says about how to sample it: fields of ``SamplingParams``.
GENERATION_CONFIG: Final = "generation_config.json"
_MODEL_INDEX: Final = "model_index.json"
_CONFIG: Final = "config.json"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INSTALL: Final = 'pip install "sidestream[diffusers]"'


@dataclass(frozen=True)
class PipelineSource:
    """What a worker needs to load a pipeline; ``model`` is local, whatever was asked for."""

    #: ``"module:Class"``.
    reference: str
    #: The checkpoint's folder; None for a pipeline that needs none.
    model: Path | None
    #: The sampling defaults in the folder's ``generation_config.json``.
    defaults: Mapping[str, Any]


def find_source(model: str | Path | None, pipeline: str | None) -> PipelineSource:
    """Find the folder of ``model`` and the class that runs it.

    ``model`` is a folder that exists, else a built-in name, else a hub id, which is downloaded
    here, with progress bars, or taken from the local cache. ``pipeline`` (``"module:Class"``)
    wins over what the folder's ``model_index.json`` says.

    Raises:
        ConfigError: The model is none of these, its files are wrong, or no adapter is known.
        MissingDependencyError: The model needs diffusers or huggingface-hub.
    """
    if model is None:
        if pipeline is None:
            raise ConfigError("model", None, "a checkpoint, or pipeline='package.module:Class'")
        return PipelineSource(pipeline, None, {})
    folder = _find_folder(model, layout_known=pipeline is None)
    reference = pipeline if pipeline is not None else _find_adapter(folder)
    return PipelineSource(reference, folder, read_defaults(folder))


def read_defaults(folder: Path) -> dict[str, Any]:
    """Read the sampling defaults of a checkpoint; ``{}`` if it has none."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    defaults = _read_object(path)
    try:
        SamplingParams().with_defaults(defaults)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", defaults, error.allowed) from error
    return defaults


def _find_folder(model: str | Path, *, layout_known: bool) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    name = str(model)
    if name in _BUILT_IN:
        return _BUILT_IN_FOLDER / name
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not folder.exists():
        return _download(model, layout_known=layout_known)
    there = "is a file" if folder.exists() else "does not exist"
    raise ConfigError(
        "model",
        name,
        f"a folder ({folder.absolute()} {there}), a built-in name ({_listed(_BUILT_IN)}), "
        "or a hub id such as 'Qwen/Qwen-Image'",
    )


def _download(hub_id: str, *, layout_known: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            "huggingface-hub", f"downloading the model {hub_id!r}", _INSTALL
        ) from error
    # In a diffusers repository the weights are in subfolders; weights beside them are the same
    # again in one file, and as large.
    wanted = ["*.json", "*/*"] if layout_known else None
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted))
        if wanted is None or (folder / _MODEL_INDEX).is_file():
            return folder
        # No diffusers repository: its weights and code are beside the config.
        return Path(snapshot_download(hub_id))
    except Exception as error:
        # The boundary to the hub's client, which lets through whatever its HTTP library, the disk
        # or the server came up with.
        raise ConfigError(
            "model",
            hub_id,
            f"a folder ({Path(hub_id).absolute()} does not exist), a built-in name "
            f"({_listed(_BUILT_IN)}), or the id of a hub repository that can be downloaded or is "
            f"in the local cache; the download failed with {type(error).__name__}: {error}",
        ) from error


def _find_adapter(folder: Path) -> str:
    path = folder / _MODEL_INDEX
    remote = None if path.is_file() else _find_remote_adapter(folder)
    if remote is None and not path.is_file():
        raise ConfigError(
            "model",
            str(folder),
            f"a folder with {_MODEL_INDEX}, as DiffusionPipeline.save_pretrained writes it, one "
            f"whose {_CONFIG} has code of its own (auto_map) for {_listed(_REMOTE_ADAPTERS)}, or "
            "any folder together with pipeline='package.module:Class'",
        )
    for package in ("diffusers", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(package, f"the model {str(folder)!r}", _INSTALL)
    if remote is not None:
        return remote
    class_name = _read_object(path).get("_class_name")
    if isinstance(class_name, str):
        if class_name in _ADAPTERS:
            return _ADAPTERS[class_name]
        if class_name in _diffusers_pipelines():
            return _ANY_ADAPTER
    raise ConfigError(
        f"{path}: _class_name",
        class_name,
        f"{_listed(_ADAPTERS)}, or another pipeline of the diffusers that is installed; for a "
        "class of your own give pipeline='package.module:Class'",
    )


def _find_remote_adapter(folder: Path) -> str | None:
    path = folder / _CONFIG
    config = _read_object(path) if path.is_file() else {}
    architectures = config.get("architectures")
    if "auto_map" not in config or not isinstance(architectures, list):
        return None
    found = (_REMOTE_ADAPTERS[name] for name in architectures if name in _REMOTE_ADAPTERS)
    return next(found, None)


def _diffusers_pipelines() -> frozenset[str]:
    """Name the pipelines that diffusers exports, without importing it: that takes seconds."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return frozenset()
    exports = Path(spec.origin).read_text(encoding="utf-8")
    return frozenset(re.findall(r'"(\w+Pipeline\w*)"', exports))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(path), "not JSON", f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), value, "a JSON object")
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
