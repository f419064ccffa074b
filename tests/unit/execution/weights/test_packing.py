"""What is packed, in which precision, and what is said about it."""

import re

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    pack_checkpoint,
)
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import PackedLinear
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.parameters import LinearPlace
from loraplex.models.spec import NormPlace
from support.naming import refused
from support.tiny_model import TinyCheckpoint

CPU = torch.device("cpu")
NATIVE, INT8, INT4, FP8 = WeightPrecision


class NotingKernels(ReferenceKernels):
    """Notes the precision of each linear layer, in the order of the model."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.precisions: list[WeightPrecision] = []

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> PackedLinear:
        self.precisions.append(precision)
        return super().pack_linear(weight, bias, precision, num_blocks)


@pytest.fixture
def checkpoint(tmp_path) -> TinyCheckpoint:
    made = TinyCheckpoint(tmp_path, hidden_size=32, intermediate_size=64)
    made.save()
    return made


def pack(
    checkpoint: TinyCheckpoint, precision: WeightPrecision, kernels: NotingKernels | None = None
) -> PackedWeights:
    form = WeightFormat(dtype=torch.float32, precision=precision)
    return pack_checkpoint(checkpoint.folder, checkpoint.config, kernels or NotingKernels(), form)


@pytest.mark.parametrize(
    ("precision", "of_layers", "of_lm_head"),
    [(NATIVE, NATIVE, NATIVE), (INT8, INT8, INT8), (INT4, INT4, INT8), (FP8, FP8, INT8)],
)
def test_every_linear_layer_has_its_precision(checkpoint, precision, of_layers, of_lm_head):
    kernels = NotingKernels()
    pack(checkpoint, precision, kernels)
    assert kernels.precisions == [of_layers] * 8 + [of_lm_head]


@pytest.mark.parametrize("precision", [INT8, INT4, FP8])
def test_embedding_and_norms_stay_as_they_are(checkpoint, precision):
    parameters = pack(checkpoint, precision).parameters
    assert torch.equal(parameters.embedding, checkpoint.tensors["model.embed_tokens.weight"])
    assert torch.equal(parameters.final_norm.weight, checkpoint.tensors["model.norm.weight"])
    norm = parameters.layers[1].norms[NormPlace.BEFORE_MIXER].weight
    assert torch.equal(norm, checkpoint.tensors["model.layers.1.input_layernorm.weight"])


@pytest.mark.parametrize(("precision", "least", "most"), [(INT8, 0.1, 1.0), (INT4, 3.0, 12.0)])
def test_the_error_and_the_worst_weight_are_reported(checkpoint, precision, least, most):
    name = "model.layers.1.mlp.down_proj"
    outlier = checkpoint.tensors[f"{name}.weight"]
    outlier[:, 0] *= 20
    checkpoint.save()
    summary = pack(checkpoint, precision).summary
    found = re.fullmatch(
        rf"{precision} weights differ by (\S+)% from the checkpoint's \(root mean square; "
        rf"most, (\S+)%, in {re.escape(name)}\)",
        summary,
    )
    assert found, summary
    mean, worst = map(float, found.groups())
    assert least < mean < most
    assert mean < worst


def test_without_quantisation_nothing_is_said(checkpoint):
    assert pack(checkpoint, NATIVE).summary == ""


def test_the_layer_that_cannot_be_quantised_is_named(tmp_path):
    checkpoint = TinyCheckpoint(tmp_path, hidden_size=32, intermediate_size=24)
    checkpoint.save()
    with refused(ConfigError, "model.layers.0.mlp.down_proj", 24, "int8", 32, param="quantization"):
        pack(checkpoint, INT4)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"lm_head": 4}, "lm_head"),
        ({"model.layers.0.self_attn.o_proj": 4}, "model.layers.0.self_attn.o_proj"),
        ({"a.b.q_proj": 4, "a.b.k_proj": 2}, "a.b.q_proj+k_proj"),
    ],
)
def test_the_name_of_a_fused_layer(parts, name):
    place = LinearPlace(parts, 8)
    assert place.name == name
    assert place.shape == (sum(parts.values()), 8)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_shared_head_are_those_of_the_embedding(tmp_path, backend, dtype):
    made = TinyCheckpoint(tmp_path, tie_word_embeddings=True)
    made.save()
    kernels = {
        "cpu": select_kernels(CPU),
        "gpu": CudaKernels(HostAccelerator()),
        "torch": ReferenceKernels(CPU),
    }[backend]
    form = WeightFormat(dtype=dtype)
    parameters = pack_checkpoint(made.folder, made.config, kernels, form).parameters
    assert parameters.packed_embedding is parameters.lm_head is not None
    ids = torch.randint(made.config.vocab_size, (9,))
    rows = kernels.weight_rows(parameters.lm_head, ids, dtype)
    embedding = made.tensors["model.embed_tokens.weight"].to(dtype)
    assert torch.equal(rows, embedding[ids])


def test_a_quantised_head_does_not_replace_the_embedding(tmp_path):
    made = TinyCheckpoint(tmp_path, hidden_size=32, tie_word_embeddings=True)
    made.save()
    parameters = pack(made, INT8).parameters
    assert parameters.packed_embedding is None
    assert torch.equal(parameters.embedding, made.tensors["model.embed_tokens.weight"])
