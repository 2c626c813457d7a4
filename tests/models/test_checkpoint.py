"""Small checkpoints made offline."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.models.checkpoint import make_checkpoint
from sidestream.models.registry import find_source

if TYPE_CHECKING:
    from pathlib import Path


def weights_of(folder: Path) -> bytes:
    return (folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()


def test_a_qwen_image_folder_is_small_and_found_by_the_registry(qwen_folder, size_of):
    assert size_of(qwen_folder) < 5_000_000
    source = find_source(qwen_folder, None)
    assert source.reference == "sidestream.models.qwen_image:QwenImage"
    assert source.defaults["height"] == source.defaults["width"] == 64


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("helios", "sidestream.models.helios:Helios"),
        ("wan", "sidestream.models.video:Wan"),
        ("ltx", "sidestream.models.video:LTX"),
    ],
)
def test_a_video_folder_is_small_and_says_how_many_frames(kind, adapter, tmp_path, size_of):
    folder = make_checkpoint(kind, tmp_path / kind)
    assert size_of(folder) < 5_000_000
    source = find_source(folder, None)
    assert source.reference == adapter
    assert source.defaults["num_frames"] > 1


def test_a_seed_gives_the_same_folder_again_and_leaves_torchs_own_alone(qwen_folder, tmp_path):
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    again = make_checkpoint("qwen-image", tmp_path / "again", seed=0)
    assert torch.equal(torch.rand(1), expected)
    assert weights_of(again) == weights_of(qwen_folder)
    other = make_checkpoint("qwen-image", tmp_path / "other", seed=1)
    assert weights_of(other) != weights_of(qwen_folder)


def test_the_tokenizer_needs_what_the_pipeline_cuts_off(library):
    prefix = library.prompt_template_encode.partition("{}")[0]
    tokens = library.tokenizer(prefix).input_ids
    assert len(tokens) == library.prompt_template_encode_start_idx


def test_any_text_goes_through_the_tokenizer_and_back(library):
    text = "Ein Apfel, 苹果 🍎\n"
    assert library.tokenizer.decode(library.tokenizer(text).input_ids) == text


def test_an_empty_folder_will_do_and_nothing_is_printed(tmp_path, capfd):
    assert make_checkpoint("qwen-image", tmp_path) == tmp_path
    assert capfd.readouterr() == ("", "")
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"]


def test_a_folder_with_something_in_it_is_not_touched(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="empty folder"):
        make_checkpoint("qwen-image", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="empty folder"):
        make_checkpoint("qwen-image", tmp_path / "file")


def test_an_unknown_kind_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"kind='gan'.*'qwen-image'"):
        make_checkpoint("gan", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_diffusers_the_install_line_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingDependencyError, match="sidestream\\[diffusers\\]"):
        make_checkpoint("qwen-image", tmp_path / "new")
