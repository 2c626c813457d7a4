"""From prompts to PNG files, through a real engine on the CPU."""

import contextlib
import io
import re
import signal
import time

import numpy as np
import pytest
from PIL import Image

from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.cli.generate import first_free_number, slug
from sidestream.cli.main import run

SIZE = ("--height", "64", "--width", "48", "--steps", "2")
IN_PROCESS = ("--platform", "cpu", "--executor", "uniproc")


@pytest.fixture(scope="module")
def rendered(checkpoint, tmp_path_factory):
    """Draw three prompts once, two of them alike, into a folder that has a picture already."""
    folder = tmp_path_factory.mktemp("rendered")
    (folder / "00006_older_seed1.png").write_bytes(b"of an earlier run")
    prompts = folder / "prompts.txt"
    prompts.write_text("a Red Fox!\n\n  \n龍\n", encoding="utf-8")
    options = ("--prompt", "a Red Fox!", "--prompts", prompts, "--out", folder, "--seed", 40)
    command = ("generate", checkpoint, *options, *SIZE, *IN_PROCESS)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert run(list(map(str, command))) == 0
    (folder / "shown.txt").write_text(shown.getvalue(), encoding="utf-8")
    return folder


def test_each_prompt_is_a_file_with_a_number_of_its_own_and_older_ones_stay(rendered):
    assert sorted(path.name for path in rendered.glob("*.png")) == [
        "00006_older_seed1.png",
        "00007_a-red-fox_seed40.png",
        "00008_a-red-fox_seed41.png",
        "00009_image_seed42.png",
    ]
    assert (rendered / "00006_older_seed1.png").read_bytes() == b"of an earlier run"


def test_the_metadata_tell_how_to_make_the_image_again(rendered, checkpoint):
    with Image.open(rendered / "00009_image_seed42.png") as image:
        assert image.size == (48, 64)
        assert image.text["prompt"] == "龍"
        assert image.text["seed"] == "42"
        assert image.text["model"] == str(checkpoint)
        assert image.text["Software"].startswith("sidestream ")


def test_the_pixels_are_the_engines(rendered, checkpoint):
    params = SamplingParams(height=64, width=48, num_inference_steps=2, seed=41)
    config = EngineConfig(model=checkpoint, platform="cpu", executor="uniproc")
    with DiffusionEngine(config) as engine:
        output = engine.submit(DiffusionRequest("a Red Fox!", params)).result(timeout=60)
    with Image.open(rendered / "00008_a-red-fox_seed41.png") as image:
        assert np.array_equal(np.asarray(image), np.asarray(output.images[0]))


def test_the_closing_line_says_counts_rate_and_times(rendered):
    shown = (rendered / "shown.txt").read_text(encoding="utf-8")
    line, _, place = shown.partition(" They are in ")
    assert place == f"{rendered}.\n"
    assert re.fullmatch(
        r"Saved 3 images in [\d.]+ s: [\d.]+ images/s \(start-up [\d.]+ s\); "
        r"median forward [\d.]+ ms(, copy [\d.]+ ms)?\.",
        line,
    )


def test_a_seed_that_is_not_given_is_drawn_and_kept_in_the_file(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    options = ("--prompts", "-", "--out", str(tmp_path), *SIZE, *IN_PROCESS)
    assert run(["generate", str(checkpoint), *options]) == 0
    seeds = []
    for path in sorted(tmp_path.glob("*.png")):
        with Image.open(path) as image:
            seeds.append(int(image.text["seed"]))
        assert path.stem.endswith(f"_seed{seeds[-1]}")
    assert seeds == [seeds[0], seeds[0] + 1]


def test_a_request_that_fails_is_one_line_and_those_before_it_are_saved(
    checkpoint, tmp_path, capsys
):
    # Latents of 24 pixels do not divide into patches; the pipeline refuses them.
    options = ("--height", "24", "--width", "24", "--steps", "1", *IN_PROCESS)
    command = ["generate", str(checkpoint), "--prompt", "x", "--out", str(tmp_path), *options]
    assert run(command) == 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert "24" in shown[0]
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.slow
def test_an_interrupt_is_quiet_and_what_was_saved_stays(checkpoint, tmp_path, start):
    prompts = [word for _ in range(500) for word in ("--prompt", "x")]
    options = ("--height", "64", "--width", "64", "--steps", "8", "--platform", "cpu")
    process = start("generate", checkpoint, *prompts, "--out", tmp_path, *options)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("*.png")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    files = list(tmp_path.glob("*.png"))
    plural = "" if len(files) == 1 else "s"
    assert err.strip() == f"Saved before: {len(files)} image{plural}, in {tmp_path}."
    assert 0 < len(files) < 500
    for path in files:
        with Image.open(path) as image:
            image.load()


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red Fox!", "a-red-fox"),
        ("../../etc/passwd", "etc-passwd"),
        ("龍", "image"),
        ("word " * 30, "word-word-word-word-word-word-word-word"),
        ("x" * 300, "image"),
    ],
)
def test_file_names_come_from_harmless_letters(prompt, name):
    assert slug(prompt) == name


def test_numbers_go_on_after_the_highest(tmp_path):
    assert first_free_number(tmp_path / "not-there") == 0
    for name in ("00003_a.png", "100000_b.png", "7.png", "note.txt"):
        (tmp_path / name).touch()
    assert first_free_number(tmp_path) == 100001
