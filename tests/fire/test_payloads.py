"""Whatever a pipeline returns arrives as it was: types, dtypes and bits, and no byte more."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest

# While tests are collected their parameters are needed already.
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))

import payload_pipes
from payload_pipes import DTYPES, MODES, PAYLOADS, Decoded, Marked, Size

WAYS = [("cpu", "multiproc"), ("sim", "multiproc"), ("cpu", "uniproc"), ("sim", "uniproc")]
#: Both platforms and both executors; the other two pairs are for the soak.
in_every_way = pytest.mark.parametrize(
    "way",
    [
        WAYS[1],
        WAYS[2],
        pytest.param(WAYS[0], marks=pytest.mark.soak),
        pytest.param(WAYS[3], marks=pytest.mark.soak),
    ],
    ids="-".join,
)
CPU = torch.device("cpu")


def deliver(engine: DiffusionEngine, prompt: str, tree: Any = None) -> sidestream.DiffusionOutput:
    return engine.submit(DiffusionRequest(prompt, inputs={"tree": tree})).result(60)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype)
    return flat.copy_(plain.reshape(-1)).view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (got.device, got.dtype, got.shape) == (CPU, sent.dtype, sent.shape)
        assert got.requires_grad == sent.requires_grad
        assert bits(got) == bits(sent)
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        if sent.dtype.hasobject:
            for one, other in zip(got.ravel(), sent.ravel(), strict=True):
                assert_same(one, other)
        else:
            assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, Image.Image):
        assert (got.mode, got.size, got.info) == (sent.mode, sent.size, sent.info)
        assert got.tobytes() == sent.tobytes()
        if sent.palette is not None:
            assert got.palette.mode == sent.palette.mode
            assert got.getpalette(None) == sent.getpalette(None)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key, value in sent.items():
            assert_same(got[key], value)
    elif isinstance(sent, list | tuple):
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            assert_same(getattr(got, field.name), getattr(sent, field.name))
    else:
        assert got == sent or (got != got and sent != sent)


def logical_bytes(tree: Any, seen: set[int] | None = None) -> int:
    """Add up what tensors and arrays hold, each once."""
    seen = set() if seen is None else seen
    if id(tree) in seen:
        return 0
    seen.add(id(tree))
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, np.ndarray) and not tree.dtype.hasobject:
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(logical_bytes(value, seen) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(logical_bytes(value, seen) for value in tree)
    if isinstance(tree, bytes | bytearray):
        return len(tree) if len(tree) > 16 << 10 else 0
    if dataclasses.is_dataclass(tree):
        return sum(logical_bytes(getattr(tree, f.name), seen) for f in dataclasses.fields(tree))
    return 0


@in_every_way
@pytest.mark.parametrize("name", PAYLOADS)
def test_what_a_pipeline_makes_arrives_bit_by_bit(couriers, way, name):
    output = deliver(couriers(way), f"make {name}")
    made = PAYLOADS[name](CPU)
    assert_same(output.output, made)
    assert output.timings.nbytes == logical_bytes(made)


@in_every_way
@pytest.mark.parametrize("name", PAYLOADS)
def test_what_goes_in_comes_out(couriers, way, name):
    tree = PAYLOADS[name](CPU)
    engine = couriers(way)
    assert_same(deliver(engine, "echo", tree).output, tree)
    request = DiffusionRequest("echo", inputs={"tree": tree})
    assert_same(engine.executor.collective_rpc("answer", (request,))[0], tree)


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
def test_no_more_leaves_the_device_than_is_asked_for(couriers, executor):
    engine = couriers(("sim", executor))
    engine.executor.collective_rpc("copied_bytes")
    for name, nbytes in [
        ("empty-view-of-a-large-one", []),
        ("small-view-of-a-large-one", [12]),
        ("expanded", [80]),
        ("eight-bytes", [8]),
        ("same-twice", [36]),
    ]:
        deliver(engine, f"make {name}")
        assert engine.executor.collective_rpc("copied_bytes") == [nbytes]


@in_every_way
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lock", r"\['frames'\]\[1\]\.frames\[0\].*lock"),
        ("lambda", r"\['frames'\]\[1\]\.frames\[0\].*lambda"),
        ("sparse tensor", r"\['frames'\]\[1\]\.frames\[0\].*to_dense"),
        ("meta tensor", r"\['frames'\]\[1\]\.frames\[0\].*meta device"),
        ("lock in an array", r"\['frames'\]\[1\]\.frames\[0\]\[1\].*lock"),
    ],
)
def test_a_leaf_that_cannot_travel_is_named_and_nothing_is_left(couriers, way, name, says):
    engine = couriers(way)
    deliver(engine, "make mixed")
    before = engine.executor.collective_rpc("holdings")
    for _ in range(3):
        with pytest.raises(sidestream.OutputTransferError, match=says):
            deliver(engine, f"make-unpackable {name}")
    assert engine.executor.collective_rpc("holdings") == before
    assert_same(deliver(engine, "make mixed").output, PAYLOADS["mixed"](CPU))
    counts = engine.stats()
    assert (counts["ready_bytes"], counts["outputs"], counts["forwards"]) == (0, 0, 0)


@pytest.mark.parametrize("platform", ["cpu", "sim"])
def test_an_output_that_will_not_arrive_fails_alone_and_its_memory_comes_back(couriers, platform):
    engine = couriers((platform, "multiproc"))
    for _ in range(3):
        with pytest.raises(sidestream.OutputTransferError, match="had enough"):
            deliver(engine, "make-refusing")
    assert engine.stats()["ready_bytes"] == 0
    assert deliver(engine, "make torch.float32").timings.nbytes == 5 * 7 * 4


# --- any tree -------------------------------------------------------------------------------------


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(draw(st.binary(min_size=64, max_size=64)) * 400, dtype=np.uint8)
    raw = raw[: count * dtype.itemsize] & (1 if dtype is torch.bool else 255)
    tensor = (
        torch.from_numpy(raw).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    )
    match draw(st.sampled_from(["as is", "permuted", "sliced", "expanded", "signed", "marked"])):
        case "permuted":
            return tensor.permute(draw(st.permutations(range(tensor.ndim))))
        case "sliced" if tensor.ndim:
            return tensor[..., ::2]
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *tensor.shape)
        case "signed" if tensor.is_complex():
            return draw(st.sampled_from([tensor.conj(), tensor.conj().imag]))
        case "marked":
            return tensor.as_subclass(Marked)
    return tensor


@st.composite
def arrays(draw) -> np.ndarray:
    dtypes = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.array_dtypes()
    dtype = draw(dtypes)
    array = np.zeros(draw(hnp.array_shapes(min_dims=0, min_side=0, max_side=4)), dtype=dtype)
    if array.nbytes and dtype.kind not in "bU":
        array.reshape(-1).view(np.uint8)[:] = draw(st.integers(0, 255))
    views = [array, array[::-1], array.T, array[..., ::2]] if array.ndim else [array]
    return draw(st.sampled_from(views))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary()
long_bytes = st.integers(16_000, 40_000).map(lambda n: bytes(range(251)) * (n // 251))
images = st.sampled_from(MODES).map(payload_pipes.image)
leaves = tensors() | arrays() | images | plain | long_bytes | long_bytes.map(bytearray)


def containers(inside):
    return (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inside, max_size=3)
        | st.builds(Size, inside, inside)
        | st.builds(Decoded, inside)
        | st.builds(lambda value: OrderedDict(value=value), inside)
    )


trees = st.recursive(leaves, containers, max_leaves=6).filter(lambda tree: tree is not None)
#: What ``.to(device)`` keeps as it is.
movable = st.recursive(tensors().filter(lambda t: type(t) is torch.Tensor) | plain, containers)


def check_any_tree(engine: DiffusionEngine, examples: int) -> None:
    @settings(max_examples=examples, database=None)
    @given(tree=trees, moved=movable)
    def arrives(tree, moved):
        assert_same(deliver(engine, "echo", tree).output, tree)
        if moved is not None:
            assert_same(deliver(engine, "echo-by-device", moved).output, moved)

    arrives()
    counts = engine.stats()
    assert (counts["ready_bytes"], counts["stale_messages"]) == (0, 0)


@pytest.mark.parametrize("way", [("sim", "multiproc"), ("cpu", "multiproc")], ids="-".join)
def test_any_tree_arrives_as_it_was_sent(couriers, way):
    check_any_tree(couriers(way), examples=25)


@pytest.mark.soak
@in_every_way
def test_many_trees_arrive_as_they_were_sent(couriers, way):
    check_any_tree(couriers(way), examples=1000)
