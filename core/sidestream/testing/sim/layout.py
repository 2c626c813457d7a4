"""What an operator is, and the shapes of what it returns, found without computing anything.

An operator is studied once, and each of its signatures is tried once on tensors without memory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

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
#: Tagged as of data-dependent shape, but only with masks, which the trial refuses.
_DYNAMIC_WITH_MASKS: Final = {"aten::index"}


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
    is_composite: bool
    is_mutating: bool
    takes_generator: bool
    mixes_host: bool


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
        trait = _TRAITS[func] = _study(func)
    return trait


def _study(func: Any) -> Trait:
    schema = func._schema
    is_composite = func._can_decompose()
    return Trait(
        kind=_kind_of(func, is_composite),
        is_composite=is_composite,
        is_mutating=schema.is_mutable,
        takes_generator=any(argument.name == "generator" for argument in schema.arguments),
        mixes_host=schema.name in _MIXES_HOST,
    )


def _kind_of(func: Any, is_composite: bool) -> Kind:
    schema, tags = func._schema, func.tags
    waits = Kind.DECOMPOSE if is_composite else Kind.WAIT
    if schema.name in _EMPTY:
        return Kind.EMPTY
    if torch.Tag.inplace_view in tags:
        return Kind.RESHAPE
    if schema.name not in _DYNAMIC_WITH_MASKS and (
        torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    ):
        return waits
    if not schema.returns:
        return Kind.LAUNCH
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return waits
    if all(result.alias_info is not None for result in schema.returns) and not schema.is_mutable:
        return Kind.DECOMPOSE if is_composite else Kind.VIEW
    return Kind.LAUNCH


def find_layout(
    func: Any, trait: Trait, operands: Operands, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Layout | Kind:
    """Find what a call returns, or the other way in which it has to be run.

    Raises whatever the operator raises for operands that don't fit together.
    """
    key = (func, *operands.key)
    found = _LAYOUTS.get(key)
    if found is None:
        found = _try(func, trait, operands, args, kwargs)
        if len(_LAYOUTS) >= _CACHED_LAYOUTS:
            _LAYOUTS.clear()
        _LAYOUTS[key] = found
    return found


def _try(
    func: Any, trait: Trait, operands: Operands, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Layout | Kind:
    shadows = {id(tensor): _shadow(tensor) for tensor in operands.tensors}
    sizes = [shadow.size() for shadow in shadows.values()]
    shadow_args, shadow_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: shadows[id(tensor)], (list(args), dict(kwargs))
    )
    shadow_kwargs.pop("generator", None)
    if shadow_kwargs.get("device") is not None:
        shadow_kwargs["device"] = torch.device("meta")
    try:
        result = func(*shadow_args, **shadow_kwargs)
    except NotImplementedError:
        return Kind.DECOMPOSE if trait.is_composite else Kind.WAIT
    if [shadow.size() for shadow in shadows.values()] != sizes:
        raise NotImplementedError(
            f"{func} would resize a tensor on a simulated device, whose size is fixed; give it an "
            "output of the right size, or none."
        )
    given = {id(shadows[id(tensor)]): n for n, tensor in reversed([*enumerate(operands.tensors)])}
    storages = {shadow.untyped_storage()._cdata for shadow in shadows.values()}
    leaves, spec = tree_flatten(result)
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif trait.is_mutating and id(leaf) in given:
            found.append(SameTensor(given[id(leaf)]))
        elif trait.is_composite and leaf.untyped_storage()._cdata in storages:
            return Kind.DECOMPOSE  # such as dropout that drops nothing: the result is a view
        else:
            found.append(NewTensor(leaf.size(), leaf.stride(), leaf.dtype))
    return Layout(tuple(found), None if spec.is_leaf() else spec)


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


# Caches of pure functions. A lost update costs a second trial and nothing else, hence no lock.
_TRAITS: Final[dict[Any, Trait]] = {}
_LAYOUTS: Final[dict[tuple[object, ...], Layout | Kind]] = {}
