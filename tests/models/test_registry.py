"""Finding a model's folder and the class that runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.models.registry import find_source

QWEN = "sidestream.models.qwen_image:QwenImage"


def write_folder(folder: Path, index: object = None, generation: object = None) -> Path:
    folder.mkdir(parents=True)
    for name, value in (("model_index.json", index), ("generation_config.json", generation)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter: imports and hub settings count from its start."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_folder_is_run_by_the_adapter_of_its_class_name(tmp_path):
    folder = write_folder(
        tmp_path / "model", {"_class_name": "QwenImagePipeline"}, {"height": 64, "comment": "x"}
    )
    source = find_source(folder, None)
    assert source.reference == QWEN
    assert source.model == folder
    assert source.defaults == {"height": 64, "comment": "x"}


def test_a_folder_may_be_given_as_text_and_needs_no_defaults(tmp_path):
    folder = write_folder(tmp_path / "model", {"_class_name": "QwenImagePipeline"})
    source = find_source(str(folder), None)
    assert source.model == folder
    assert source.defaults == {}


def test_an_explicit_pipeline_wins_over_the_index(tmp_path):
    folder = write_folder(
        tmp_path / "model", {"_class_name": "QwenImagePipeline"}, {"num_inference_steps": 3}
    )
    source = find_source(folder, "mine:Own")
    assert source.reference == "mine:Own"
    assert source.defaults == {"num_inference_steps": 3}


def test_an_explicit_pipeline_needs_no_index(tmp_path):
    folder = write_folder(tmp_path / "model")
    assert find_source(folder, "mine:Own").model == folder


def test_a_pipeline_may_come_without_a_model():
    source = find_source(None, "mine:Own")
    assert (source.reference, source.model, source.defaults) == ("mine:Own", None, {})


def test_neither_model_nor_pipeline_is_refused():
    with pytest.raises(ConfigError, match="model=None"):
        find_source(None, None)


def test_a_built_in_name_is_a_folder_of_the_package():
    source = find_source("digits", None)
    assert source.reference == QWEN
    assert source.model is not None
    assert (source.model / "model_index.json").is_file()
    assert source.defaults["height"] == 64


def test_a_folder_comes_before_a_built_in_name(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "digits", {"_class_name": "QwenImagePipeline"})
    monkeypatch.chdir(tmp_path)
    assert find_source("digits", None).model == folder


@pytest.mark.parametrize("model", ["no-such-model", "./not/there", "/not/there", "a/b/c"])
def test_a_name_that_is_nothing_says_what_was_tried(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-such-model").write_text("a file is no folder")
    with pytest.raises(ConfigError) as caught:
        find_source(model, None)
    message = str(caught.value)
    assert str(tmp_path) in message or "/not/there" in message
    assert "'digits'" in message
    assert "hub id" in message


def test_a_path_object_is_never_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find_source(Path("org/name"), None)


def test_a_folder_without_an_index_says_which_file_is_missing(tmp_path):
    folder = write_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        find_source(folder, None)


def test_an_unknown_class_name_lists_the_known_ones(tmp_path):
    folder = write_folder(tmp_path / "model", {"_class_name": "NobodysPipeline"})
    with pytest.raises(ConfigError, match=r"NobodysPipeline.*'QwenImagePipeline'"):
        find_source(folder, None)


@pytest.mark.parametrize("index", [{}, {"_class_name": ["own", "Class"]}, {"_class_name": 3}])
def test_an_index_without_a_usable_class_name_is_refused(index, tmp_path):
    folder = write_folder(tmp_path / "model", index)
    with pytest.raises(ConfigError, match="_class_name"):
        find_source(folder, None)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
@pytest.mark.parametrize("name", ["model_index.json", "generation_config.json"])
def test_a_broken_file_is_named(name, text, tmp_path):
    folder = write_folder(tmp_path / "model", {"_class_name": "QwenImagePipeline"})
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        find_source(folder, None)


def test_an_impossible_default_names_the_file_and_the_field(tmp_path):
    folder = write_folder(tmp_path / "model", {"_class_name": "QwenImagePipeline"}, {"height": -1})
    with pytest.raises(ConfigError, match=r"generation_config\.json.*height"):
        find_source(folder, None)


@pytest.mark.parametrize("package", ["diffusers", "transformers"])
def test_a_missing_library_is_said_with_the_install_line(package, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model", {"_class_name": "QwenImagePipeline"})
    hide(monkeypatch, package)
    with pytest.raises(MissingDependencyError, match="sidestream\\[diffusers\\]") as caught:
        find_source(folder, None)
    assert caught.value.package == package


def test_a_hub_id_without_the_hubs_client_says_the_install_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="sidestream\\[diffusers\\]"):
        find_source("org/name", None)


def hide(monkeypatch, package: str) -> None:
    """Make a package look as if it were not installed: nothing on the path has it."""
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name)
    )


def fill_cache(cache: Path, revision: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """Lay out a hub cache by hand, as a download of org/name would have."""
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return write_folder(
        repository / "snapshots" / revision, {"_class_name": "QwenImagePipeline"}, {"width": 32}
    )


FIND_HUB_ID = """
from sidestream.models.registry import find_source
source = find_source("org/name", None)
print(source.model, source.reference, source.defaults["width"])
"""


def test_a_hub_id_in_the_local_cache_is_found_offline(tmp_path):
    snapshot = fill_cache(tmp_path / "cache")
    printed = run_python(FIND_HUB_ID, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert printed == f"{snapshot} {QWEN} 32"


def test_a_hub_id_that_is_not_cached_says_why_it_could_not_be_had(tmp_path):
    code = """
from sidestream.errors import ConfigError
from sidestream.models.registry import find_source
try:
    find_source("org/name", None)
except ConfigError as error:
    print(error)
"""
    printed = run_python(code, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert "org/name" in printed
    assert "the download failed with" in printed
    assert "'digits'" in printed


def test_the_registry_imports_neither_torch_nor_diffusers():
    code = """
import sys
import sidestream.models.registry, sidestream.models.post_process, sidestream.models.pipeline
print([name for name in ("torch", "diffusers", "transformers", "PIL") if name in sys.modules])
"""
    assert run_python(code) == "[]"
