"""What an object holds on a device is found wherever it is, so that nothing overwrites it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sidestream.worker.held_tensors import held_tensors


@dataclass
class Plain:
    value: Any
    others: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    value: Any


class SlottedChild(Slotted):
    __slots__ = ("second",)


class Mapped(dict):
    """With attributes besides, as the outputs of transformers."""


def child(tensor):
    made = SlottedChild(None)
    made.second = tensor
    return made


def mapped(tensor):
    made = Mapped(a=1)
    made.extra = tensor
    return made


@pytest.mark.parametrize(
    "put",
    [
        lambda t: t,
        lambda t: [1, ("x", {"deep": [t]})],
        lambda t: {t},
        lambda t: deque([t]),
        lambda t: Plain(None, [Plain(t)]),
        Slotted,
        child,
        mapped,
        lambda t: t.unbind(),
    ],
    ids=["itself", "nested", "set", "deque", "attribute", "slot", "inherited", "both", "views"],
)
def test_a_tensor_is_found(put):
    tensor = torch.zeros(1)
    (found,) = held_tensors(put(tensor), "cpu")
    assert found.data_ptr() == tensor.data_ptr()


def test_each_is_found_once_also_in_a_circle():
    tensor = torch.zeros(1)
    outer = Plain(tensor)
    outer.others += [outer, tensor, {"again": outer}]
    assert len(held_tensors(outer, "cpu")) == 1


def test_other_devices_and_networks_are_left_out():
    held = Plain(torch.zeros(1, device="meta"), [torch.nn.Linear(1, 1), torch.Tensor, len])
    assert held_tensors(held, "cpu") == []
