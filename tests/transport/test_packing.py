"""The payload codec: what goes in comes out, types, dtypes and bits included."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import sys
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from sidestream.errors import InternalError
from sidestream.transport.packing import (
    PackingError,
    UnpackingError,
    detach_copy,
    pack,
    pack_bytes,
    unpack,
    unpack_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]

Size = namedtuple("Size", ["height", "width"])


@dataclasses.dataclass
class Decoded:
    frames: Any
    fps: float = 24.0


class Marked(torch.Tensor):
    """A tensor with something said about it."""


def through_a_slot(tree):
    packed = pack(tree)
    memory = np.full(packed.nbytes, 0xA5, dtype=np.uint8)
    packed.write(torch.from_numpy(memory))
    packed.drop()
    return unpack(packed.head, memory)


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    wide = tensor.element_size() == 16
    same_size = tensor if wide else tensor.view(carrier[tensor.element_size()])
    return same_size.contiguous().numpy().tobytes()


def assert_same(got, sent) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape, bits(got)) == (sent.dtype, sent.shape, bits(sent))
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.dtype.hasobject or got.tobytes() == sent.tobytes()
        if sent.dtype.hasobject:
            for one, other in zip(got.ravel(), sent.ravel(), strict=True):
                assert_same(one, other)
    elif isinstance(sent, Image.Image):
        assert (got.mode, got.size, got.tobytes()) == (sent.mode, sent.size, sent.tobytes())
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


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = 2 if dtype is torch.bool else 256
    raw = random.integers(0, top, count * dtype.itemsize, dtype=np.uint8)
    flat = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    match draw(st.sampled_from(["as is", "permuted", "sliced", "expanded", "conj", "neg", "cls"])):
        case "permuted":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        case "sliced" if tensor.ndim:
            tensor = tensor[..., ::2]
        case "expanded":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        case "conj" if dtype.is_complex:
            tensor = tensor.conj()
        case "neg" if dtype in (torch.complex64, torch.complex128):
            tensor = tensor.conj().imag
        case "cls":
            tensor = draw(
                st.sampled_from(
                    [
                        tensor.as_subclass(Marked),
                        torch.nn.Parameter(tensor, requires_grad=False),
                    ]
                )
            )
    return tensor


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = draw(
        st.one_of(
            hnp.scalar_dtypes(),
            hnp.unicode_string_dtypes(),
            hnp.array_dtypes(allow_subarrays=False),
        )
    )
    array = np.zeros(draw(hnp.array_shapes(min_dims=0, min_side=0, max_side=4)), dtype=dtype)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if array.nbytes and dtype.kind not in "bU":
        array.reshape(-1).view(np.uint8)[:] = random.integers(0, 256, array.nbytes, dtype=np.uint8)
    if array.ndim:
        array = draw(st.sampled_from([array, array[::-1], array.T, array[..., ::2]]))
    return array


def images() -> st.SearchStrategy[Image.Image]:
    return st.builds(
        lambda mode, size: Image.radial_gradient("L").resize(size).convert(mode),
        st.sampled_from(["L", "RGB", "RGBA", "1", "F"]),
        st.tuples(st.integers(1, 200), st.integers(1, 200)),
    )


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary()
long_bytes = st.integers(16_000, 40_000).map(lambda n: bytes(range(251)) * (n // 251))
leaves = tensors() | arrays() | images() | plain | long_bytes | long_bytes.map(bytearray)


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


@settings(max_examples=150)
@given(tree=trees)
def test_a_tree_arrives_as_it_was_sent(tree):
    assert_same(through_a_slot(tree), tree)


@settings(max_examples=50)
@given(tree=trees)
def test_a_tree_fits_in_one_byte_string(tree):
    assert_same(unpack_bytes(pack_bytes(tree, root="request")), tree)


@settings(max_examples=50)
@given(tree=trees)
def test_a_detached_copy_is_the_same_and_shares_nothing(tree):
    copy = detach_copy(tree)
    assert_same(copy, tree)
    if isinstance(tree, torch.Tensor | np.ndarray):
        assert not np.shares_memory(pack_memory(copy), pack_memory(tree))


def pack_memory(leaf) -> np.ndarray:
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().as_subclass(torch.Tensor)
        return np.zeros(1, np.uint8) if not plain.numel() else storage(plain)
    return leaf


def storage(tensor: torch.Tensor) -> np.ndarray:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage()).numpy()


@settings(max_examples=50)
@given(tensor=tensors())
def test_a_private_payload_does_not_see_what_its_caller_writes_later(tensor):
    before = bits(tensor)
    packed = pack([tensor])
    packed.make_private(clone_device=True)
    if tensor.numel():
        storage(tensor.detach().as_subclass(torch.Tensor))[:] = 0
    memory = np.empty(packed.nbytes, dtype=np.uint8)
    packed.write(torch.from_numpy(memory))
    (got,) = unpack(packed.head, memory)
    assert bits(got) == before


@settings(max_examples=50)
@given(tensor=tensors())
def test_no_more_travels_than_a_leaf_holds(tensor):
    packed = pack(tensor)
    assert packed.leaf_nbytes == tensor.numel() * tensor.element_size()
    assert packed.leaf_nbytes <= packed.nbytes < packed.leaf_nbytes + 256
    assert len(packed.head) < 400


@settings(max_examples=50)
@given(tensor=tensors())
def test_a_tensor_alone_travels_as_one_in_a_tree(tensor):
    alone, (inside,) = through_a_slot(tensor), through_a_slot([tensor])
    assert_same(alone, inside)
    assert (alone.stride(), alone.is_conj()) == (inside.stride(), inside.is_conj())


def test_what_a_tensor_is_made_to_show_later_does_not_travel():
    sent = torch.full((5000,), 3)
    packed = pack(sent)
    sent.data = torch.zeros(1)
    memory = torch.empty(packed.nbytes, dtype=torch.uint8)
    packed.write(memory)
    assert (unpack(packed.head, memory.numpy()) == 3).all()


def test_only_memory_in_one_piece_that_is_large_enough_is_written_to():
    packed = pack(torch.ones(100))
    for place in (
        torch.zeros(packed.nbytes - 1, dtype=torch.uint8),
        torch.zeros(packed.nbytes, dtype=torch.int8),
        torch.zeros(2 * packed.nbytes, dtype=torch.uint8)[::2],
        torch.zeros(packed.nbytes, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(InternalError):
            packed.write(place)
        assert place.is_meta or not place.any()


def test_a_view_moves_its_own_bytes_and_not_its_storage():
    large = torch.zeros(1 << 20)
    assert pack(large[10:20]).leaf_nbytes == 40
    empty = pack(large[:0])
    assert (empty.nbytes, len(empty.head) < 400) == (0, True)


def test_a_channels_last_image_arrives_channels_last():
    sent = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7).to(memory_format=torch.channels_last)
    got = through_a_slot(sent)
    assert got.stride() == sent.stride()
    assert torch.equal(got, sent)


def test_a_fortran_array_arrives_in_fortran_order():
    sent = np.asfortranarray(np.arange(30.0).reshape(5, 6))
    got = through_a_slot(sent)
    assert got.flags.f_contiguous
    np.testing.assert_array_equal(got, sent)


def test_padding_of_a_structured_array_travels_with_it():
    dtype = np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8]})
    sent = np.frombuffer(bytes(range(64)), dtype=dtype)[::-1]
    got = through_a_slot(sent)
    assert got.view("V16").tobytes() == sent.view("V16").tobytes()
    assert got.dtype == dtype


def test_the_same_tensor_twice_is_one_tensor_there_too():
    tensor, data = torch.ones(300), bytes(20_000)
    packed = pack([tensor, {"again": tensor}, data, data])
    assert packed.leaf_nbytes == 1200 + 20_000
    first, second, *rest = through_a_slot([tensor, {"again": tensor}, data, data])
    assert second["again"] is first
    assert rest[0] is rest[1]


def test_a_tree_may_contain_itself():
    tree = [torch.ones(3)]
    tree.append(tree)
    got = through_a_slot(tree)
    assert got[1] is got


def test_tensors_inside_an_object_array_are_leaves():
    tree = np.empty((2,), dtype=object)
    tree[:] = [torch.ones(1000), {"x": np.zeros(500)}]
    packed = pack(tree)
    assert packed.leaf_nbytes == 8000
    assert_same(through_a_slot(tree), tree)


def test_an_image_travels_in_the_slot():
    image = Image.effect_noise((300, 200), 50).convert("RGB")
    packed = pack({"images": [image]})
    assert packed.leaf_nbytes == 300 * 200 * 3
    assert len(packed.head) < 1000
    assert_same(through_a_slot({"images": [image]}), {"images": [image]})


@pytest.mark.parametrize("mode", ["P", "PA"])
@pytest.mark.parametrize("colors", ["RGB", "RGBA", "CMYK"])
def test_a_palette_keeps_its_colors_and_their_transparency(mode, colors):
    image = Image.linear_gradient("L").convert(mode)
    image.putpalette(np.random.default_rng(0).bytes(256 * len(colors)), colors)
    image.info["from"] = "a test"
    for got in (through_a_slot([image])[0], unpack_bytes(pack_bytes(image, root="x"))):
        assert (got.mode, got.palette.mode) == (image.mode, image.palette.mode)
        assert got.getpalette(colors) == image.getpalette(colors)
        assert got.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
        assert got.info == image.info


def test_a_subclass_keeps_its_attributes_and_a_parameter_its_gradient_flag():
    marked = torch.ones(2).as_subclass(Marked)
    marked.prompt = "a cat"
    got, parameter = through_a_slot([marked, torch.nn.Parameter(torch.ones(2))])
    assert (type(got), got.prompt) == (Marked, "a cat")
    assert (type(parameter), parameter.requires_grad) == (torch.nn.Parameter, True)


def test_history_of_autograd_stays_behind():
    weight = torch.ones(3, requires_grad=True)
    got = through_a_slot(weight * 2)
    assert (got.requires_grad, got.grad_fn) == (False, None)


def test_what_arrives_can_be_written_to():
    tensor, array = through_a_slot([torch.zeros(3), np.zeros(3)])
    tensor += 1
    array += 1
    assert (tensor.sum(), array.sum()) == (3, 3)


def test_read_only_memory_gives_copies():
    packed = pack(torch.ones(4))
    memory = np.empty(packed.nbytes, dtype=np.uint8)
    packed.write(torch.from_numpy(memory))
    memory.flags.writeable = False
    got = unpack(packed.head, memory)
    got.zero_()
    assert memory.any()


def test_a_writable_byte_string_is_shared_and_a_read_only_one_copied():
    data = bytearray(pack_bytes(torch.zeros(100), root="request"))
    unpack_bytes(data).fill_(1)
    assert torch.equal(unpack_bytes(data), torch.ones(100))
    frozen = bytes(data)
    unpack_bytes(frozen).fill_(2)
    assert torch.equal(unpack_bytes(frozen), torch.ones(100))


def test_a_byte_string_at_an_odd_address_gives_aligned_tensors():
    data = pack_bytes(torch.arange(100, dtype=torch.float64), root="request")
    shifted = memoryview(bytearray(b"?" + data))[1:]
    got = unpack_bytes(shifted)
    assert got.data_ptr() % 16 == 0
    assert torch.equal(got, torch.arange(100, dtype=torch.float64))


def test_none_is_no_payload_but_a_result():
    with pytest.raises(PackingError, match=r"output: None is no payload"):
        pack(None)
    assert unpack_bytes(pack_bytes(None, root="result")) is None


def test_a_default_device_does_not_reach_the_codec():
    packed = pack_bytes([torch.ones(2), torch.ones(0)], root="request")
    sent = torch.ones(2)
    with torch.device("meta"):
        got = [*unpack_bytes(packed), detach_copy(sent)]
    assert [tensor.device.type for tensor in got] == ["cpu"] * 3


def nested():
    with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Wrapper(torch.Tensor):
    """Says it is on the CPU and has no memory there."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device="cpu")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch._efficientzerotensor(3), "without memory"),
        (lambda: lambda: 0, "lambda"),
        (threading.Lock, "lock"),
        (lambda: (i for i in ()), "generator"),
        (lambda: sys.stderr, "TextIOWrapper|EncodedFile"),
        (lambda: torch.ones(3).to_sparse(), r"layout is torch.sparse_coo.*to_dense"),
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (nested, "nested"),
        (Wrapper, "Wrapper wraps other tensors"),
    ],
    ids=["zeros", "lambda", "lock", "generator", "file", "sparse", "meta", "nested", "wrapper"],
)
def test_what_cannot_travel_is_refused_by_its_path(make, reason):
    culprit = make()
    tree = {"frames": [torch.ones(2), Decoded((Size(1, culprit),))]}
    with pytest.raises(PackingError, match=reason) as caught:
        pack(tree)
    assert caught.value.path == "output['frames'][1].frames[0].width"
    assert str(caught.value).startswith(caught.value.path)


def test_a_quantized_tensor_is_refused():
    with warnings.catch_warnings(action="ignore"):  # torch deprecates the constructor
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(PackingError, match="quantized"):
        pack([quantized])


def test_a_class_that_fails_to_pickle_is_named_where_it_is():
    with pytest.raises(PackingError) as caught:
        pack_bytes([1, {"deep": Unwilling()}], root="arguments")
    assert caught.value.path == "arguments[1]['deep']"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Unwilling:
    def __reduce__(self):
        raise ZeroDivisionError("not today")


def test_too_deep_a_tree_is_refused():
    tree = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(PackingError, match="nested too deeply"):
        pack(tree)
    while tree:  # taken apart by hand: deallocation recurses too
        tree = tree.pop()


def test_a_packing_error_keeps_its_path_through_a_pickle():
    error = pickle.loads(pickle.dumps(PackingError("output[0]", "no")))
    assert (error.path, error.reason, str(error)) == ("output[0]", "no", "output[0]: no")


def test_a_class_that_is_not_there_is_an_error_that_says_so():
    head = pack(datetime.date(2026, 1, 1)).head.replace(b"datetime", b"datetimf")
    with pytest.raises(UnpackingError, match=r"datetimf.*importable on both sides"):
        unpack(head, None)


def test_while_another_thread_imports_pillow_there_is_no_image_and_the_rest_travels(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", types.ModuleType("PIL.Image"))  # empty as yet
    assert through_a_slot(Decoded([1.0, "a"])) == Decoded([1.0, "a"])


def test_dropping_lets_go_of_the_tensors():
    array = np.zeros(10)
    alive = weakref.ref(array)
    packed = pack(array)
    del array
    assert alive() is not None
    packed.drop()
    assert alive() is None


def test_copies_release_the_gil(monkeypatch):
    packed = pack(torch.zeros(8 << 20))
    memory = torch.empty(packed.nbytes, dtype=torch.uint8)
    counted, stop = 0, threading.Event()

    def count():
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0)  # hands the GIL over

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the GIL up
    free_runs, give_up_at = 0, time.monotonic() + 20
    try:
        thread.start()
        # On busy cores the other thread may not get one during many of the copies.
        while free_runs < 3 and time.monotonic() < give_up_at:
            before = counted
            packed.write(memory)
            free_runs += counted - before > 50
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    # A handful comes through anyway, since torch lets go of the GIL for each slice it makes.
    assert free_runs >= 3
