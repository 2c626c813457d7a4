import pytest
import torch


@pytest.fixture(autouse=True)
def _one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture
def device(sim):
    return sim.device()


@pytest.fixture
def default(sim, device):
    return sim.default_stream()


@pytest.fixture
def side(sim, device):
    """A side stream, made by the hook as anybody else would make one."""
    return sim.side_stream(device, 0)
