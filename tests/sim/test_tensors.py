"""Tensors on the simulated device give what the CPU gives, later."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

MODES = [torch.inference_mode, torch.no_grad]


def agrees(there, here):
    """Whether both hold the same shapes, types and (but for rounding) values."""
    torch.testing.assert_close(there.cpu(), here)
    return there.device.type == "sim" and there.shape == here.shape


class Block(nn.Module):
    """A little of everything that image models are made of."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 12), nn.GELU(), nn.Dropout(0.5))

    def forward(self, image):
        hidden = functional.silu(self.norm(self.conv(image)))
        hidden = functional.interpolate(hidden, scale_factor=2, mode="nearest")
        tokens = self.encoder(hidden.flatten(2).transpose(1, 2))
        left, right = self.out(tokens).chunk(2, dim=-1)
        return torch.cat([left * torch.sigmoid(right), torch.stack([left, right]).mean(0)], -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made_in", MODES)
def test_a_module_gives_what_it_gives_on_the_cpu(mode, made_in, device):
    torch.manual_seed(0)
    module, image = Block().eval(), torch.randn(2, 3, 4, 4)
    with made_in():
        moved, there = copy.deepcopy(module).to(device), image.to(device)
    with mode():
        assert agrees(moved(there), module(image))
        assert torch.equal(moved(there).cpu(), moved(there).cpu())


@pytest.mark.parametrize("mode", MODES)
def test_attention_gives_what_it_gives_on_the_cpu(mode, device):
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    with mode():
        there = functional.scaled_dot_product_attention(
            q.to(device), k.to(device), v.to(device), attn_mask=mask.to(device)
        )
        assert agrees(there, functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.full((3, 4, 5), 7.0, device=device),
        lambda device: torch.zeros(2, 3, dtype=torch.bfloat16, device=device),
        lambda device: torch.arange(2, 20, 3, device=device),
        lambda device: torch.arange(5.0, device=device),
        lambda device: torch.linspace(0, 1, 7, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.tensor([[1.5, 2], [3, 4]], device=device),
        lambda device: torch.randn(5, generator=torch.Generator().manual_seed(3)).to(device),
        lambda device: torch.ones(3, device=device).new_zeros(2),
        lambda device: torch.ones(3, device=device).to(torch.uint8),
        lambda device: torch.scalar_tensor(4, device=device),
    ],
)
def test_factories_make_what_they_make_on_the_cpu(make, device):
    assert agrees(make(device), make(torch.device("cpu")))


@pytest.mark.parametrize(
    "work",
    [
        lambda t: t[1:, ::2],
        lambda t: t[[0, 2]],
        lambda t: t[t > 4],
        lambda t: t[torch.tensor([2, 0])],
        lambda t: t.masked_select(t > 4),
        lambda t: torch.where(t > 4)[0],
        lambda t: (t > 4).nonzero(),
        lambda t: t.unique(),
        lambda t: t.topk(2).values,
        lambda t: torch.stack(t.split(1)).squeeze(1),
        lambda t: torch.einsum("ab,cb->ac", t, t),
        lambda t: t.repeat_interleave(2, dim=0),
        lambda t: t.to(torch.bfloat16) @ t.to(torch.bfloat16).t(),
        lambda t: torch.polar(t, t * 2),
        lambda t: torch.view_as_real(torch.view_as_complex(t.view(3, 2, 2)) * 1j),
        lambda t: t.float().view(torch.uint8),
        lambda t: t.clamp(0, 3).round().div(2, rounding_mode="floor"),
        lambda t: t.clone().masked_fill_(t > 4, 0),
        lambda t: t.new_zeros(4).index_put_((torch.tensor([1]),), t[0, 1]),
        lambda t: functional.pad(t[None], (1, 1), mode="reflect"),
        lambda t: functional.one_hot(t.long().flatten()),
        lambda t: torch.linalg.inv(t[:, :3] + torch.eye(3).to(t.device) * 9),
        lambda t: functional.dropout(t, training=False) + 1,
        lambda t: t.sum() + t.max() + t.std(),
        lambda t: t.cumsum(0).flip(1).roll(1),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_operators_give_what_they_give_on_the_cpu(mode, work, device):
    with mode():
        source = torch.arange(12.0).view(3, 4)
        for _ in range(2):  # the second call knows the first one's shapes
            assert agrees(work(source.to(device)), work(source))


def test_a_scalar_is_read_from_the_device(device, default):
    tensor = torch.arange(3.0, device=device)
    assert tensor[2].item() == 2.0
    assert float(tensor.sum()) == 3.0
    assert bool((tensor > 1).any())
    assert f"{tensor[1]:.1f}" == "1.0"
    assert torch.equal(tensor, tensor.clone())


def test_a_tensor_is_made_of_numbers_on_the_device(device):
    number = torch.tensor(2.5).to(device)
    assert agrees(torch.tensor([number, 1.0], device=device), torch.tensor([2.5, 1.0]))
    assert torch.equal(torch.tensor([number]), torch.tensor([2.5]))


def test_autocast_is_off_on_the_device_whatever_is_asked_for(device):
    a = torch.ones(2, 2, device=device)
    with torch.autocast("sim", enabled=False):
        assert (a @ a).dtype == torch.float32
    with pytest.warns(UserWarning, match="Disabling autocast"), torch.autocast("sim"):
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float32, "nan"),
        (torch.bfloat16, "nan"),
        (torch.float8_e5m2, "nan"),
        (torch.complex64, "nan"),
        (torch.uint8, 255),
        (torch.int64, 2**63 - 1),
        (torch.bool, True),
    ],
)
def test_memory_that_nobody_wrote_is_poison(dtype, poison, device):
    for tensor in (
        torch.empty(3, dtype=dtype, device=device),
        torch.empty_like(torch.ones(3, device=device), dtype=dtype),
    ):
        host = tensor.cpu()
        if poison == "nan":
            assert torch.isnan(host.to(torch.complex64)).all()
        else:
            assert host.tolist() == [poison] * 3


def test_a_view_shares_its_bases_memory(device, default):
    base = torch.zeros(4, device=device)
    default.hold()
    view = base.view(2, 2)[1]
    view.fill_(1)
    base[0].add_(5)
    assert view.data_ptr() == base.data_ptr() + 8
    default.release()
    assert base.tolist() == [5.0, 0.0, 1.0, 1.0]


def test_shape_changes_in_place_keep_the_memory(device):
    tensor = torch.arange(6.0, device=device).view(2, 3)
    tensor.t_().unsqueeze_(0)
    assert tensor.shape == (1, 3, 2)
    tensor.add_(1)
    assert tensor.tolist() == [[[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]]


def test_an_out_tensor_of_the_right_size_is_written(device):
    out = torch.empty(2, device=device)
    assert torch.add(torch.ones(2, device=device), 1, out=out) is out
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t @ t, RuntimeError, "same reduction dim|shapes cannot be multiplied"),
        (lambda t: t + torch.ones(2, 3), RuntimeError, r"shape \(2, 3\) on cpu"),
        (lambda t: torch.ones(2, 3).add_(t), RuntimeError, "on the same device"),
        (lambda t: torch.tensor(1.0).add_(t.sum()), RuntimeError, "copy it there with copy_"),
        (lambda t: t + t.to("sim:1"), RuntimeError, "sim:0 and sim:1"),
        (lambda t: t.numpy(), TypeError, "Use Tensor.cpu"),
        (lambda t: pickle.dumps(t), TypeError, "can't be pickled"),
        (lambda t: torch.save(t, io.BytesIO()), TypeError, "can't be pickled"),
        (lambda t: t.resize_(100), ValueError, "resize"),
        (lambda t: torch.add(t, t, out=t.new_empty(0)), ValueError, "output of the right size"),
        (lambda t: torch.empty(2, device="sim", pin_memory=True), RuntimeError, "pinned"),
        (
            lambda t: torch.randn(2, device="sim", generator=torch.Generator()),
            RuntimeError,
            "Draw on the CPU",
        ),
        (lambda t: setattr(t, "data", torch.ones(2)), RuntimeError, "set the data"),
    ],
)
def test_what_a_device_can_not_do_is_refused_at_the_call(call, error, message, sim, device):
    tensor = torch.ones(2, 3, device=device)
    with pytest.raises(error, match=message):
        call(tensor)
    sim.synchronize_device(device)  # the device is well


def test_a_module_changes_type_and_comes_back(device):
    module = nn.Linear(2, 2).to(device).to(torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16
    assert module.weight.memory.dtype is torch.bfloat16
    back = module.to("cpu")
    assert type(back.weight) is nn.Parameter
    assert back.weight.device.type == "cpu"


def test_a_module_takes_a_state_from_the_host(device):
    module, state = nn.Linear(2, 2).to(device), nn.Linear(2, 2).state_dict()
    module.load_state_dict(state)
    assert torch.equal(module.weight.cpu(), state["weight"])


def test_a_parameter_is_copied_as_a_parameter(device):
    module = copy.deepcopy(nn.Linear(2, 2).to(device))
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.requires_grad


def test_a_tensor_like_one_of_a_device_can_be_made_elsewhere(device):
    tensor = torch.ones(2, 3, device=device)
    assert torch.zeros_like(tensor, device="cpu").tolist() == [[0.0] * 3] * 2
    assert tensor.to("meta").is_meta
    assert torch.full_like(tensor, 4, device="sim:2").sum().item() == 24


def test_random_operators_follow_the_seed(device, default):
    torch.manual_seed(5)
    first = torch.randn(4, device=device).tolist()
    default.hold()
    torch.manual_seed(5)
    second = torch.randn(4, device=device)
    torch.manual_seed(6)
    default.release()
    assert second.tolist() == first


def test_printing_a_tensor_does_not_wait_for_it(device, default):
    default.hold()
    assert repr(torch.ones(2, 3, device=device)) == (
        "SimTensor(shape=(2, 3), dtype=torch.float32, device='sim:0')"
    )
