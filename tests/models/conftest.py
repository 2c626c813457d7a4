"""Checkpoints and loaded pipelines that the model tests share; built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")


from sidestream.config import PipelineConfig  # noqa: E402
from sidestream.models.checkpoint import make_checkpoint  # noqa: E402
from sidestream.models.qwen_image import QwenImage  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def on_cpu():
    """Make the configuration that loads a folder onto the CPU, in float32."""

    def config(folder: Path | None, **changed) -> PipelineConfig:
        values = {"model": folder, "device": torch.device("cpu"), "dtype": torch.float32}
        return PipelineConfig(**{**values, **changed})

    return config


@pytest.fixture(scope="session")
def size_of():
    """Sum the bytes of a folder's files."""

    def size(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    return size


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory) -> Path:
    return make_checkpoint("qwen-image", tmp_path_factory.mktemp("qwen") / "checkpoint")


@pytest.fixture(scope="session")
def hunyuan_folder(tmp_path_factory) -> Path:
    return make_checkpoint("hunyuan-image-3", tmp_path_factory.mktemp("hunyuan") / "checkpoint")


@pytest.fixture(scope="session")
def loaded_adapter(qwen_folder, on_cpu):
    return QwenImage.load(on_cpu(qwen_folder))


@pytest.fixture
def adapter(loaded_adapter):
    """The shared adapter, without a step hook that an earlier test left."""
    yield loaded_adapter
    loaded_adapter.on_step = None


@pytest.fixture(scope="session")
def library(qwen_folder):
    """diffusers' own pipeline of the same folder, to compare with."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(
        qwen_folder, dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
