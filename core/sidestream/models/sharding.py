"""Tensor parallelism: each rank holds a part of the weights, and partial results are added up.

The ranks talk over torch.distributed's default group, which whoever starts them makes. Each runs
the same requests in the same order; after every sum all of them hold the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn

from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.config import PipelineConfig

_WEIGHTS: Final = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided: along ``dim``, each of ``blocks`` equal blocks by itself."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class ShardPlan:
    """What the ranks of a model share; all names are patterns in which ``*`` stands for anything.

    What is not named here every rank holds whole.
    """

    #: Parameters that are divided.
    cuts: Mapping[str, Cut]
    #: Modules whose results are partial: summed over all ranks.
    sums: Sequence[str]
    #: The number that the world size has to divide beside the sizes themselves: attention heads.
    divided: int
    #: Parameters that count once in a sum: zeros on all ranks but the first.
    once: Sequence[str] = ()

    @classmethod
    def of(cls, model: Any) -> ShardPlan:
        """Take a model's own ``shard_plan``, else the ``_tp_plan`` of a diffusers model.

        Raises:
            ConfigError: There is none, or it has a style that is not known here.
        """
        own = getattr(model, "shard_plan", None)
        if isinstance(own, ShardPlan):
            return own
        cuts: dict[str, Cut] = {}
        sums: list[str] = []
        for module, style in (model._tp_plan or {"the model": None}).items():
            if style == "colwise":
                cuts[f"{module}.weight"] = cuts[f"{module}.bias"] = Cut(0)
            elif style == "rowwise":
                cuts[f"{module}.weight"] = Cut(1)
                sums.append(module)
            else:
                name = type(model).__name__
                allowed = "'colwise' or 'rowwise', for tensor parallelism"
                raise ConfigError(f"{name}._tp_plan: {module}", style, allowed)
        biases = [f"{module}.bias" for module in sums]
        return cls(cuts, sums, divided=model.config.num_attention_heads, once=biases)


def load_shard(model_class: Any, folder: Path, config: PipelineConfig) -> Any:
    """Load this rank's part of a diffusers model, reading no more of its files than that.

    Raises:
        ConfigError: The model has no plan, the world size doesn't divide it, or the folder lacks
            a weight.
    """
    with init_empty_weights():
        model = model_class.from_config(model_class.load_config(folder))
    plan = ShardPlan.of(model)
    _check(model, plan, config.world_size)
    missing = dict(model.named_parameters())
    for name, stored in _stored_weights(folder):
        if name not in missing:
            continue
        tensor = _cut(stored, _find(plan.cuts, name), config.rank, config.world_size)
        if config.rank and any(fnmatchcase(name, pattern) for pattern in plan.once):
            tensor.zero_()
        kept = set(name.split(".")) & set(model._keep_in_fp32_modules or ())
        dtype = torch.float32 if kept else config.dtype
        _set_parameter(model, name, tensor.to(config.device, dtype))
        del missing[name]
    if missing:
        raise ConfigError("model", str(folder), f"a folder with the weights {sorted(missing)}")
    sum_over_ranks(model, plan)
    return model.to(config.device).eval()


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor of any shape in a parameter's place."""
    module, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(value, requires_grad=False)
    model.get_submodule(module).register_parameter(leaf, parameter)


def sum_over_ranks(model: nn.Module, plan: ShardPlan) -> None:
    """Have a model that holds one rank's part sum its partial results with the others'."""
    for name, module in model.named_modules():
        if any(fnmatchcase(name, pattern) for pattern in plan.sums):
            module.register_forward_hook(_sum)


def _sum(_module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
    if torch.distributed.get_backend() != "gloo" or result.device.type == "cpu":
        torch.distributed.all_reduce(result)
        return result
    # gloo sums in the host's memory.
    on_host = result.cpu()
    torch.distributed.all_reduce(on_host)
    return result.copy_(on_host)


def _check(model: nn.Module, plan: ShardPlan, world_size: int) -> None:
    divided = {"attention heads": plan.divided}
    for name, parameter in model.named_parameters():
        cut = _find(plan.cuts, name)
        if cut is not None:
            divided[name] = parameter.shape[cut.dim] // cut.blocks
    for what, number in divided.items():
        if number % world_size:
            raise ConfigError(
                "tensor_parallel_size", world_size, f"a divisor of {number}, the size of {what}"
            )


def _find(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    return next((cut for pattern, cut in cuts.items() if fnmatchcase(name, pattern)), None)


def _cut(stored: Any, cut: Cut | None, rank: int, world_size: int) -> Tensor:
    """Read one rank's part of a weight in a safetensors file."""
    shape = stored.get_shape()
    if cut is None:
        whole: Tensor = stored[:]
        return whole
    block = shape[cut.dim] // cut.blocks
    share = block // world_size
    parts = []
    for first in range(rank * share, shape[cut.dim], block):
        where = [slice(None)] * len(shape)
        where[cut.dim] = slice(first, first + share)
        parts.append(stored[tuple(where)])
    return torch.cat(parts, cut.dim).contiguous()


def _stored_weights(folder: Path) -> Iterator[tuple[str, Any]]:
    index = folder / f"{_WEIGHTS}.index.json"
    files = [_WEIGHTS]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for file in files:
        if not (folder / file).is_file():
            raise ConfigError("model", str(folder), f"a folder with {file}")
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_slice(name)
