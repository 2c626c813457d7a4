"""The checkpoint that comes with the package draws what it is asked for."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest

from sidestream.models.post_process import find_post_process, to_images
from sidestream.models.qwen_image import QwenImage
from sidestream.models.registry import find_source
from sidestream.request import DiffusionRequest, SamplingParams

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def digits(on_cpu):
    source = find_source("digits", None)
    return QwenImage.load(on_cpu(source.model))


@pytest.fixture(scope="module")
def recognize():
    """A nearest-neighbor classifier on the data that the model was trained with."""
    datasets = pytest.importorskip("sklearn.datasets")
    neighbors = pytest.importorskip("sklearn.neighbors")
    pixels, labels = datasets.load_digits(return_X_y=True)
    classifier = neighbors.KNeighborsClassifier(1).fit(pixels / 16, labels)

    def recognize(images):
        small = [image.convert("L").resize((8, 8), PIL.Image.Resampling.BOX) for image in images]
        return classifier.predict([np.asarray(image).ravel() / 255 for image in small])

    return recognize


def draw(digits, prompts, seed):
    params = SamplingParams(seed=seed)
    payloads = digits.forward([DiffusionRequest(prompt, params) for prompt in prompts])
    key, post_process = find_post_process(digits)
    return [to_images(post_process.device(payload, params), key)[0] for payload in payloads]


@pytest.mark.parametrize("kind", ["{digit}", "{word}", "a handwritten {digit}"])
def test_each_kind_of_prompt_draws_its_digit(kind, digits, recognize):
    prompts = [kind.format(digit=digit, word=word) for digit, word in enumerate(WORDS)]
    seen = [recognize(draw(digits, prompts, seed)) for seed in (0, 100)]
    right = sum(int((one == np.arange(10)).sum()) for one in seen)
    assert right >= 18, f"{right} of 20 for {kind!r}: {seen}"


def test_seeds_draw_different_sevens(digits):
    one, two = (np.asarray(draw(digits, ["7"], seed)[0], dtype=int) for seed in (1, 2))
    assert np.abs(one - two).max() > 100


def test_the_folder_is_small_and_has_a_model_card(size_of):
    folder = find_source("digits", None).model
    assert size_of(folder) < 2_000_000
    card = (folder / "README.md").read_text()
    assert "CC BY 4.0" in card


def test_its_defaults_are_those_of_its_training():
    defaults = find_source("digits", None).defaults
    assert (defaults["height"], defaults["width"]) == (64, 64)
    assert defaults["num_inference_steps"] == 8
    assert 2 <= defaults["true_cfg_scale"] <= 4
    assert defaults["negative_prompt"] == " "
