"""What an operator is, and the shapes of what it returns, known before its operands' values are.

An operator is studied once, and each of its signatures is tried once on zeros.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from sidestream.testing.sim.memory import extent
from sidestream.testing.sim.operands import Operands

#: Enough for a large model; over it the cache starts anew.
_CACHED_LAYOUTS: Final = 20_000

_EMPTY: Final = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
#: Operators that take index tensors of the host beside tensors of a device.
_MIXES_HOST: Final = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}
#: The shape of the result depends on values only where an index is a mask.
_DYNAMIC_WITH_MASKS: Final = {"aten::index", "aten::_unsafe_index"}
_MASKS: Final = {torch.bool, torch.uint8}
#: Composites that are run as one kernel, which saves time. Not the rest: some return an operand's
#: view without saying so, others ask for values on their way.
_RUN_WHOLE: Final = {
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    "aten::group_norm",
    "aten::layer_norm",
    "aten::linear",
    "aten::matmul",
    "aten::rms_norm",
    "aten::scaled_dot_product_attention",
    "aten::softmax.int",
}


class Kind(enum.Enum):
    """How an operator is run."""

    #: Allocate the results, queue a kernel.
    LAUNCH = enum.auto()
    #: Allocate the result, queue nothing.
    EMPTY = enum.auto()
    #: Metadata only: the result shares its operand's memory.
    VIEW = enum.auto()
    #: Metadata only, in place.
    RESHAPE = enum.auto()
    #: The result decides its own shape, or is a Python value: the host waits for it.
    WAIT = enum.auto()
    #: A composite, whose parts arrive one by one.
    DECOMPOSE = enum.auto()


@dataclass(frozen=True, slots=True)
class Trait:
    """What there is to know of an operator, whatever it is called with."""

    kind: Kind
    is_mutating: bool
    takes_generator: bool
    mixes_host: bool
    is_dynamic_with_masks: bool


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A result to allocate."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SameTensor:
    """A result that is an operand itself, by its place among the tensors."""

    index: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What one signature of an operator returns."""

    leaves: tuple[Any, ...]
    #: How the leaves make up the result; None: the result is the only leaf.
    spec: TreeSpec | None


def study(func: Any) -> Trait:
    """Find an operator's trait; cached."""
    trait = _TRAITS.get(func)
    if trait is None:
        schema = func._schema
        trait = _TRAITS[func] = Trait(
            kind=_kind_of(func),
            is_mutating=schema.is_mutable,
            takes_generator=any(argument.name == "generator" for argument in schema.arguments),
            mixes_host=schema.name in _MIXES_HOST,
            is_dynamic_with_masks=schema.name in _DYNAMIC_WITH_MASKS,
        )
    return trait


def _kind_of(func: Any) -> Kind:
    schema, tags = func._schema, func.tags
    if schema.name in _EMPTY:
        return Kind.EMPTY
    if torch.Tag.inplace_view in tags:
        return Kind.RESHAPE
    if func._can_decompose() and func.name() not in _RUN_WHOLE:
        return Kind.DECOMPOSE
    if schema.name not in _DYNAMIC_WITH_MASKS and (
        torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    ):
        return Kind.WAIT
    if not schema.returns:
        return Kind.LAUNCH
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return Kind.WAIT
    if all(result.alias_info is not None for result in schema.returns) and not schema.is_mutable:
        return Kind.VIEW
    return Kind.LAUNCH


def find_layout(
    func: Any, trait: Trait, operands: Operands, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Layout | None:
    """Find what a call returns; None where only its operands' values tell.

    Raises whatever the operator raises for operands that don't fit together.
    """
    key = (func, *operands.key)
    if key in _LAYOUTS:
        return _LAYOUTS[key]
    if trait.is_dynamic_with_masks and any(t.dtype in _MASKS for t in operands.tensors[1:]):
        found = None
    else:
        found = _try(func, trait, operands.tensors, args, kwargs)
    if len(_LAYOUTS) >= _CACHED_LAYOUTS:
        _LAYOUTS.clear()
    _LAYOUTS[key] = found
    return found


def _try(
    func: Any,
    trait: Trait,
    tensors: Sequence[torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Layout | None:
    # Not on torch's "meta" device first: many of its kernels import the compiler, which takes
    # seconds in every process, and their strides are not always the CPU's.
    try:
        return _try_on("cpu", func, trait, tensors, args, kwargs)
    except Exception:  # noqa: BLE001  # boundary: torch's operators, some of which refuse zeros
        try:
            return _try_on("meta", func, trait, tensors, args, kwargs)
        except NotImplementedError:
            return None


def _try_on(
    where: str,
    func: Any,
    trait: Trait,
    tensors: Sequence[torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Layout:
    """Run an operator on tensors that share only their layout with the operands."""
    shadows = {id(tensor): _shadow(tensor, where) for tensor in tensors}
    sizes = [shadow.size() for shadow in shadows.values()]
    shadow_args, shadow_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: shadows[id(tensor)], (list(args), dict(kwargs))
    )
    if trait.takes_generator:
        shadow_kwargs["generator"] = torch.Generator() if where == "cpu" else None
    if shadow_kwargs.get("device") is not None:
        shadow_kwargs["device"] = torch.device(where)
    result = func(*shadow_args, **shadow_kwargs)
    if [shadow.size() for shadow in shadows.values()] != sizes:
        raise ValueError(
            f"{func} would resize a tensor on a simulated device, whose size is fixed; give it an "
            "output of the right size, or none."
        )
    places = {id(shadows[id(tensor)]): n for n, tensor in reversed([*enumerate(tensors)])}
    leaves, spec = tree_flatten(result)
    found = tuple(_describe(leaf, places if trait.is_mutating else {}) for leaf in leaves)
    return Layout(found, None if spec.is_leaf() else spec)


def _describe(leaf: Any, places: Mapping[int, int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) in places:
        return SameTensor(places[id(leaf)])
    return NewTensor(leaf.size(), leaf.stride(), leaf.dtype)


def _shadow(tensor: torch.Tensor, where: str) -> torch.Tensor:
    size, stride = tensor.size(), tensor.stride()
    zeros = torch.zeros(extent(size, stride), dtype=tensor.dtype, device=where)
    return zeros.as_strided(size, stride)


# Caches of pure functions. A lost update costs a second trial and nothing else, hence no lock.
_TRAITS: Final[dict[Any, Trait]] = {}
_LAYOUTS: Final[dict[tuple[object, ...], Layout | None]] = {}
