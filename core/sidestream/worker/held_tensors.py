"""The tensors that an object holds, wherever in it they are."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

#: What is not looked into: code, and types. Modules of a network neither, see below.
_CLOSED: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)
_COLLECTIONS: Final = (list, tuple, set, frozenset, deque)


def held_tensors(root: object, device_type: str) -> list[Tensor]:
    """List the tensors on devices of a type that ``root`` holds, each once.

    Looks into collections, mappings and the attributes of objects, however deep; not into networks
    (``nn.Module``) or what a function closes over.
    """
    import torch

    found: list[Tensor] = []
    seen: dict[int, object] = {}  # with what it knows by its address, so that nobody else gets that
    ahead: list[object] = [root]
    while ahead:
        value = ahead.pop()
        if isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.device.type == device_type:
                found.append(value)
        elif not isinstance(value, torch.nn.Module):
            ahead.extend(_parts(value))
    return found


def _parts(value: Any) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _COLLECTIONS):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(kind.__dict__.get(name), types.MemberDescriptorType):
                yield getattr(value, name, None)
