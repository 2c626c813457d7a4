"""The two halves of post-processing, measured against diffusers' own."""

from __future__ import annotations

import sys

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.models.post_process import (
    _DIFFUSION_POST_PROCESS_FUNCS,
    _to_uint8,
    find_post_process,
    to_images,
)
from sidestream.request import SamplingParams

KEY = "QwenImagePipeline"
QWEN = _DIFFUSION_POST_PROCESS_FUNCS[KEY]


def decoded(n: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values around every rounding edge, some outside -1 to 1 as several decoders give them."""
    generator = torch.Generator().manual_seed(n * height + width)
    return (torch.rand(n, 3, height, width, generator=generator) * 2.6 - 1.3).to(dtype)


def pixels_of(images: list[PIL.Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(image) for image in images])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uint8_has_the_bits_of_the_librarys_pil_images(dtype):
    raw = decoded(3, 96, 80, dtype)
    expected = pixels_of(VaeImageProcessor().postprocess(raw, "pil"))
    result = QWEN.device(raw, SamplingParams(output_type="uint8"))
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    np.testing.assert_array_equal(result.numpy(), expected)
    np.testing.assert_array_equal(pixels_of(QWEN.host(result)), expected)


def test_uint8_has_the_librarys_bits_for_every_bfloat16_value():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    raw = bits[bits.isfinite()]
    raw = raw[: len(raw) // 768 * 768].view(1, 3, 16, -1)
    expected = pixels_of(VaeImageProcessor().postprocess(raw, "pil"))
    np.testing.assert_array_equal(QWEN.device(raw, SamplingParams()).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_is_the_librarys_tensor(dtype):
    raw = decoded(2, 16, 16, dtype)
    result = QWEN.device(raw, SamplingParams(output_type="float"))
    expected = VaeImageProcessor().postprocess(raw, "pt")
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    np.testing.assert_array_equal(
        pixels_of(QWEN.host(result)), pixels_of(VaeImageProcessor().postprocess(raw, "pil"))
    )


def test_latents_keep_their_bits_and_are_no_images():
    latents = torch.randn(1, 16, 16)
    result = QWEN.device(latents, SamplingParams(output_type="latent"))
    assert torch.equal(result, latents)
    with pytest.raises(TypeError, match="latents"):
        to_images(result, KEY)


@pytest.mark.parametrize("output_type", ["uint8", "float", "latent"])
def test_the_device_half_leaves_the_payload_alone_and_shares_no_memory(output_type):
    raw = decoded(1, 16, 16)
    before = raw.clone()
    result = QWEN.device(raw, SamplingParams(output_type=output_type))
    result.zero_()
    assert torch.equal(raw, before)


@settings(max_examples=60)
@given(
    n=st.integers(0, 4),
    height=st.integers(1, 12),
    width=st.integers(1, 9),
    workspace=st.integers(1, 8000),
)
def test_blocks_of_any_size_give_the_same_bits(n, height, width, workspace):
    raw = decoded(n, height, width)
    assert torch.equal(_to_uint8(raw, workspace), _to_uint8(raw, 1 << 30))


def test_a_view_of_a_batch_is_read_where_it_is():
    batch = decoded(4, 16, 16).transpose(2, 3)
    whole = QWEN.device(batch, SamplingParams())
    assert torch.equal(QWEN.device(batch[1:3], SamplingParams()), whole[1:3])


@pytest.mark.parametrize("payload", [torch.zeros(3, 8, 8), torch.zeros(1, 3, 8, 8).byte()])
def test_the_device_half_refuses_what_no_decoder_gives(payload):
    with pytest.raises(TypeError, match=r"\(n, 3, H, W\)"):
        QWEN.device(payload, SamplingParams())


class TestFindPostProcess:
    def test_a_class_is_found_by_its_name(self):
        class QwenImagePipeline:
            pass

        assert find_post_process(QwenImagePipeline()) == (KEY, QWEN)

    def test_an_attribute_names_another_key(self):
        class Own:
            post_process = KEY

        assert find_post_process(Own()) == (KEY, QWEN)

    def test_an_unknown_class_has_none(self):
        assert find_post_process(object()) is None

    def test_none_switches_it_off(self):
        class QwenImagePipeline:
            post_process = None

        assert find_post_process(QwenImagePipeline()) is None

    def test_a_key_that_is_not_there_is_an_error_that_lists_the_keys(self):
        class Own:
            post_process = "Missing"

        with pytest.raises(ConfigError, match=r"Own.post_process='Missing'.*QwenImagePipeline"):
            find_post_process(Own())


class TestToImagesWithoutAKey:
    def test_uint8_in_a_batch_or_alone(self):
        pixels = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
        for tree in (pixels, torch.from_numpy(pixels), list(pixels), (pixels[0], pixels[1])):
            images = to_images(tree, None)
            assert [image.size for image in images] == [(5, 4), (5, 4)]
            np.testing.assert_array_equal(pixels_of(images), pixels)

    @pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
    def test_the_channels_choose_the_mode(self, channels, mode):
        (image,) = to_images(np.zeros((4, 5, channels), np.uint8), None)
        assert image.mode == mode

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_float_is_channels_first_and_clipped(self, dtype):
        (image,) = to_images(torch.full((3, 4, 5), 7.0, dtype=dtype), None)
        assert image.size == (5, 4)
        assert image.getpixel((0, 0)) == (255, 255, 255)

    def test_an_image_passes_through(self):
        image = PIL.Image.new("RGB", (2, 2))
        assert to_images([image, [image]], None) == [image, image]

    @pytest.mark.parametrize(
        "tree",
        [None, "text", {"a": 1}, np.zeros((4, 5), np.uint8), torch.zeros(2, 7, 4, 5)],
        ids=["none", "text", "dict", "no channels", "7 channels"],
    )
    def test_anything_else_says_what_it_got_and_what_to_do(self, tree):
        with pytest.raises(TypeError, match=rf"{type(tree).__name__}.*output\.output"):
            to_images(tree, None)

    def test_without_pillow_the_install_line_is_said(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingDependencyError, match="pip install pillow"):
            to_images(np.zeros((4, 5, 3), np.uint8), None)
