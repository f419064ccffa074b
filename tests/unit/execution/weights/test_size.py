"""Size of weights by config.json, compared with what the kernels pack."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.execution.weights.size import weights_size
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.models.registry import read_config
from support.checkpoints import save_random_model, tiny_sizes
from support.naming import refused
from support.quantized_checkpoints import CASES, quantize_folder


def backends() -> dict[str, Kernels]:
    return {
        "cpu": select_kernels(torch.device("cpu")),
        "gpu": CudaKernels(HostAccelerator()),
    }


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        (backend, precision)
        for backend in ("cpu", "gpu")
        for precision in WeightPrecision
        if (backend, precision) != ("cpu", WeightPrecision.FP8)
    ],
)
def test_it_is_what_is_packed(backend, precision):
    config, kernels = read_config(BASE_PATH), backends()[backend]
    form = WeightFormat(dtype=torch.bfloat16, precision=precision)
    packed = pack_checkpoint(BASE_PATH, config, kernels, form).num_bytes
    assert weights_size(config, torch.bfloat16, precision) == pytest.approx(packed, rel=0.02)


def test_a_head_that_is_the_embedding_counts_once():
    config = dataclasses.replace(read_config(BASE_PATH), tie_word_embeddings=False)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    num_bytes = config.vocab_size * config.hidden_size * 2
    sizes = [weights_size(each, torch.bfloat16, WeightPrecision.NATIVE) for each in (config, tied)]
    assert sizes[0] - sizes[1] == num_bytes


@pytest.fixture(scope="module", params=CASES)
def stored(request, tmp_path_factory):
    """Groups of 16 inputs, as in these cases, have the largest share of scales."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 64}
    save_random_model(folder, LlamaConfig(**tiny_sizes(128, hidden_size=256, **sizes)))
    quantize_folder(folder, CASES[request.param])
    return folder


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_stored_weights_take_about_what_is_said(stored, backend):
    spec, form = read_model(stored), WeightFormat(dtype=torch.bfloat16)
    packed = pack_checkpoint(stored, spec, backends()[backend], form)
    expected = weights_size(spec, torch.bfloat16, WeightPrecision.NATIVE)
    assert expected == pytest.approx(packed.num_bytes, rel=0.15)
    assert spec.stored_format is not None
    is_widened = spec.stored_format.bits is None
    assert ("are kept as they are" in packed.summary) == (not is_widened)
    widened = weights_size(
        dataclasses.replace(spec, stored_format=None), torch.bfloat16, WeightPrecision.NATIVE
    )
    assert (expected == widened) == is_widened


def test_a_layer_that_cannot_be_quantised_is_named(monkeypatch):
    def refuse(_precision, _in_features):
        raise ConfigError("a multiple of 32")

    monkeypatch.setattr("loraplex.execution.weights.size.group_size_of", refuse)
    with refused(
        ConfigError, "model.layers.0.self_attn.q_proj+k_proj+v_proj", 32, param="quantization"
    ):
        weights_size(read_config(BASE_PATH), torch.bfloat16, WeightPrecision.INT4)
