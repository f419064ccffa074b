"""Experts in 8 and 4 bits: as transformers computes with the rounded weights; the router's stay."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.execution.weights.size import weights_size
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.models.registry import read_config
from support.families.case import FamilyCase
from support.families.experts import mixtral, qwen2_moe
from support.families.gemma4 import gemma4_experts
from support.reference_completions import completion, recorded_driver, relative_error
from support.rounded_weights import rounded, rounded_inputs
from support.step_driver import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

# Sizes that int4 divides into groups.
CASES = {
    "mixtral": FamilyCase(config=lambda: mixtral(intermediate_size=64)),
    "qwen2-moe": FamilyCase(
        config=lambda: qwen2_moe(
            intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=64
        )
    ),
    "gemma4": FamilyCase(
        config=lambda: gemma4_experts(
            intermediate_size=64, moe_intermediate_size=32, global_head_dim=32
        )
    ),
}
NEVER_QUANTIZED = ("norm", "embed_tokens", "mlp.gate.", "router.", "shared_expert_gate", "bias")
TOLERANCE = 3e-2
"""Relative to the largest logit. Inputs are rounded to 8 bits: a sum that differs in its last bit
may become the next number."""
PROMPT = Prompt(tuple(range(3, 29)))
NUM_NEW_TOKENS = 8
INT8, INT4 = WeightPrecision.INT8, WeightPrecision.INT4


@torch.no_grad()
def round_weights(model: PreTrainedModel, precision: WeightPrecision) -> dict[str, torch.Tensor]:
    """Return what was rounded."""
    weights = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not any(part in name for part in NEVER_QUANTIZED)
    }
    for name, parameter in weights.items():
        of_head = INT8 if name == "lm_head.weight" else precision
        parameter.copy_(rounded(name, parameter, of_head))
    return weights


@pytest.mark.parametrize("precision", [INT8, INT4])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_rounded_weights(name: str, precision: WeightPrecision, tmp_path: Path) -> None:
    model = CASES[name].save(tmp_path)
    # Otherwise experts are one product.
    model.set_experts_implementation("eager")
    with rounded_inputs(round_weights(model, precision)):
        logits, tokens = completion(model, PROMPT, NUM_NEW_TOKENS)
    driver, sampler = recorded_driver(tmp_path, {}, is_scrambled=False, quantization=precision)
    (generated,) = driver.generate([PROMPT], NUM_NEW_TOKENS, prompt_logits=True)
    assert relative_error(sampler.logits[0], logits) < TOLERANCE
    assert generated == tokens


def backends() -> dict[str, Kernels]:
    return {
        "cpu": select_kernels(torch.device("cpu")),
        "gpu": CudaKernels(HostAccelerator()),
    }


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("precision", [WeightPrecision.NATIVE, INT8, INT4])
def test_the_planned_size_is_what_is_packed(
    backend: str, precision: WeightPrecision, tmp_path: Path
) -> None:
    config = qwen2_moe(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=128,
        num_experts=32,
        num_hidden_layers=2,
    )
    FamilyCase(config=lambda: config).save(tmp_path)
    spec, form = read_config(tmp_path), WeightFormat(dtype=torch.bfloat16, precision=precision)
    packed = pack_checkpoint(tmp_path, spec, backends()[backend], form).num_bytes
    assert weights_size(spec, torch.bfloat16, precision) == pytest.approx(packed, rel=0.05)
