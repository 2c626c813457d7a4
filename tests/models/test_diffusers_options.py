"""Options of pipelines made of diffusers' parts: each does something, and says so if it can't."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sidestream.errors import ConfigError, MissingDependencyError
from sidestream.models.any_diffusers import AnyDiffusers
from sidestream.models.hunyuan_image3 import HunyuanImage3
from sidestream.models.qwen_image import QwenImage
from sidestream.request import DiffusionRequest, SamplingParams

from .tiny_pipelines import flux, saved

pytestmark = pytest.mark.slow

REQUEST = DiffusionRequest(
    "a red apple", SamplingParams(height=64, width=64, num_inference_steps=2, seed=7)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(flux, tmp_path_factory.mktemp("options") / "flux")


@pytest.fixture(scope="module")
def load(folder, on_cpu):
    return lambda **options: AnyDiffusers.load(on_cpu(folder, options=options))


@pytest.fixture(scope="module")
def plain(load):
    return load().forward([REQUEST])[0]


@pytest.fixture(scope="module")
def lora(folder, on_cpu, tmp_path_factory):
    """LoRA weights of the pipeline's attention, as the library saves them."""
    from diffusers import FluxPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    transformer = AnyDiffusers.load(on_cpu(folder)).pipeline.transformer
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"]))
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "lora" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    place = tmp_path_factory.mktemp("lora")
    FluxPipeline.save_lora_weights(place, get_peft_model_state_dict(transformer))
    return place


def test_single_components_have_dtypes_of_their_own(load):
    pipeline = load(component_dtypes={"vae": "bfloat16"}).pipeline
    assert pipeline.vae.dtype == torch.bfloat16
    assert pipeline.transformer.dtype == torch.float32


def test_float8_stores_the_denoisers_weights_in_a_byte_and_computes_in_more(load, plain):
    adapter = load(quantization="float8")
    block = adapter.pipeline.transformer.transformer_blocks[0]
    assert block.attn.to_q.weight.dtype == torch.float8_e4m3fn
    (payload,) = adapter.forward([REQUEST])
    assert payload.dtype == torch.float32
    assert not torch.equal(payload, plain)
    torch.testing.assert_close(payload, plain, rtol=0, atol=0.6)


def test_a_quantization_that_is_not_possible_here_is_refused_by_name(load):
    assert importlib.util.find_spec("bitsandbytes") is None
    with pytest.raises((MissingDependencyError, ConfigError), match="pipeline_options: quantiz"):
        load(
            quantization={
                "quant_backend": "bitsandbytes_8bit",
                "quant_kwargs": {"load_in_8bit": True},
                "components_to_quantize": ["transformer"],
            }
        )


def test_blocks_are_compiled_with_the_arguments_that_are_given(load, plain):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    adapter = load(compile={"backend": backend})
    (payload,) = adapter.forward([REQUEST])
    torch._dynamo.reset()
    # One for each kind of block: repeated ones share theirs.
    assert len(graphs) >= 2
    torch.testing.assert_close(payload, plain, rtol=0, atol=1e-4)


def test_an_attention_backend_reaches_every_block(load, plain):
    adapter = load(attention_backend="_native_math")
    processor = adapter.pipeline.transformer.transformer_blocks[0].attn.processor
    assert processor._attention_backend == "_native_math"
    torch.testing.assert_close(adapter.forward([REQUEST])[0], plain, rtol=0, atol=1e-4)


def test_tiles_are_decoded_one_by_one(load):
    adapter = load(vae_tiling=True)
    vae = adapter.pipeline.vae
    vae.tile_latent_min_size = 16
    decoded = []
    hook = vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
    try:
        adapter.forward([REQUEST])
    finally:
        hook.remove()
    assert len(decoded) > 1


def test_lora_weights_move_the_pixels_by_their_scale(load, lora, plain):
    (whole,) = load(lora=str(lora)).forward([REQUEST])
    (file,) = load(lora=[lora / "pytorch_lora_weights.safetensors"]).forward([REQUEST])
    (nothing,) = load(lora={"path": lora, "scale": 0.0}).forward([REQUEST])
    assert torch.equal(whole, file)
    assert (whole - plain).abs().max() > 0.01
    torch.testing.assert_close(nothing, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("adapter", "checkpoint"),
    [(AnyDiffusers, "folder"), (QwenImage, "qwen_folder"), (HunyuanImage3, "hunyuan_folder")],
)
def test_offloaded_models_stay_on_the_host_and_give_the_same_bits(
    adapter, checkpoint, on_cpu, sim, request
):
    folder = request.getfixturevalue(checkpoint)
    device = sim.device()
    (kept,) = adapter.load(on_cpu(folder, device=device)).forward([REQUEST])
    offloaded = adapter.load(on_cpu(folder, device=device, options={"cpu_offload": "model"}))
    parts = offloaded.pipeline.components.values()
    models = [part for part in parts if isinstance(part, torch.nn.Module)]
    assert {model.device.type for model in models} == {"cpu"}
    (payload,) = offloaded.forward([REQUEST])
    assert payload.device == device
    assert torch.equal(payload.cpu(), kept.cpu())


@pytest.mark.parametrize("way", ["model", "sequential", "group"])
def test_offload_to_the_cpu_means_nothing_on_the_cpu(way, load):
    with pytest.raises(ConfigError, match=f"cpu_offload='{way}'.*the CPU already"):
        load(cpu_offload=way)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fast": True}, "fast.*component_dtypes.*lora"),
        ({"component_dtypes": {"vae": "int4"}}, r"component_dtypes\['vae'\]='int4'"),
        ({"quantization": "int3"}, "quantization='int3'.*'float8'"),
        ({"cpu_offload": "disk"}, "cpu_offload='disk'.*'model'"),
        ({"attention_backend": "telepathy"}, "attention_backend='telepathy'.*native"),
        ({"lora": "/no/such/folder"}, "lora='/no/such/folder'"),
        ({"lora": [{"file": "x"}]}, "lora.*path"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(options, why, load):
    with pytest.raises(ConfigError, match=why):
        load(**options)


@pytest.mark.parametrize(
    ("adapter", "checkpoint"), [(QwenImage, "qwen_folder"), (HunyuanImage3, "hunyuan_folder")]
)
def test_adapters_of_their_own_take_the_options_too(adapter, checkpoint, on_cpu, request):
    folder = request.getfixturevalue(checkpoint)
    options = {"quantization": "float8", "component_dtypes": {"vae": "bfloat16"}}
    loaded = adapter.load(on_cpu(folder, options=options))
    stored = {parameter.dtype for parameter in loaded.pipeline.transformer.parameters()}
    assert torch.float8_e4m3fn in stored
    (payload,) = loaded.forward([REQUEST])
    assert payload.dtype == torch.bfloat16
