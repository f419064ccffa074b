"""Ranks that share every layer give what one rank gives: tokens, logits and refusals."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from loraplex.core.adapter import TargetPart
from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.registry import read_config
from support.expert_adapters import RankOf, random_expert_adapter
from support.families import every, experts, first, hybrids
from support.families.case import VOCAB_SIZE, FamilyCase, sizes
from support.rank_threads import rank_driver
from support.reference_completions import relative_error
from support.step_driver import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = every.CASES
SIZES = sizes(hidden_size=64, intermediate_size=256, head_dim=32, num_hidden_layers=2)
DELTA_HEADS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
BITS = {
    "llama": FamilyCase(config=lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama-1-kv-head": FamilyCase(
        config=lambda: LlamaConfig(**(SIZES | {"num_key_value_heads": 1}))
    ),
    "gemma": FamilyCase(config=lambda: first.gemma(**(SIZES | {"num_key_value_heads": 4}))),
    "mixtral": FamilyCase(config=lambda: experts.mixtral(**SIZES, num_local_experts=4)),
    "qwen3.5": FamilyCase(config=lambda: hybrids.qwen3_5(**SIZES, **DELTA_HEADS)),
    "qwen3-next": FamilyCase(config=lambda: hybrids.qwen3_next(**SIZES, **DELTA_HEADS)),
}
"""Models whose row layers have four blocks in every precision."""
PRECISIONS = ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"})
QUICK = ("gemma", "mixtral")
SLOW = (
    *(
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4-keys-are-values",
        "gemma4-experts",
        "phi3",
        "glm4",
        "granite",
        "cohere2",
        "gpt-neox",
        "bloom",
        "falcon-new",
    ),
    *(
        "opt-350m",
        "starcoder2",
        "internlm2",
        "baichuan",
        "qwen2-moe",
        "gpt-oss",
        "olmo2",
        "olmoe",
        "qwen3-moe",
    ),
    *("granite-hybrid", "granite-hybrid-moe", "bamba", "nemotron-h-biases", "nemotron-h-latent"),
    *("qwen3.5", "qwen3.5-three-values", "qwen3.5-moe", "qwen3-next"),
    *("seed-oss", "apertus", "arcee", "hunyuan", "exaone4", "ernie", "ernie-moe"),
    *("glm4-moe", "solar-open", "minimax-m2", "llama4"),
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash", "mistral4"),
)
TWO_ONLY = (
    *("gpt-neox", "bloom", "olmo2", "olmoe", "minimax-m2"),
    *("qwen3.5", "qwen3.5-three-values", "qwen3.5-moe", "qwen3-next"),
)
"""Models that four ranks cannot share."""
MAX_RANK = 8
NUM_TOKENS = 8
TOLERANCE = 2e-6
"""Relative to the largest logit, in float32: ranks add in another order."""
TOLERANCES = dict.fromkeys(hybrids.CASES, 5e-6)
"""Tolerances of models with a delta rule: up to 3.2e-6 on two ranks of the reference."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj")
RANKS: Mapping[str, RankOf] = {
    "all": lambda layer, module, expert: 1 + (layer + len(module) + expert) % MAX_RANK,
    "rows": lambda _, module, __: 3 * module.endswith(("o_proj", "down_proj", "dense")),
    "attention": lambda _, module, __: 5 * (module in ATTENTION),
    "one module": lambda layer, module, _: 8 * (layer == 1 and module.endswith("k_proj")),
}


def adapters_of(folder: Path) -> dict[int, HostAdapter]:
    """Return adapters of mixed ranks, one of them with DoRA and shifts of what it adapts."""
    spec = read_config(folder)
    made = [
        random_expert_adapter(spec, name, rank_of, seed)
        for seed, (name, rank_of) in enumerate(RANKS.items())
    ]
    made.append(with_vectors(random_expert_adapter(spec, "vectors", RANKS["attention"], 9)))
    return dict(enumerate((adapter for adapter in made if adapter.weights), start=5))


def with_vectors(adapter: HostAdapter) -> HostAdapter:
    """Return the adapter with a magnitude and a shift for each linear layer."""
    generator = torch.Generator().manual_seed(7)
    parts = [
        HostPart(
            msgspec.structs.replace(weight.target, rank=1, in_features=0, part=part),
            0.5 + torch.rand(weight.target.out_features, generator=generator),
        )
        for weight in adapter.weights
        for part in (TargetPart.FACTOR, TargetPart.SHIFT)
    ]
    return dataclasses.replace(adapter, parts=tuple(sorted(parts, key=lambda p: p.target)))


def prompts_of(adapters: Mapping[int, HostAdapter]) -> list[Prompt]:
    uses = [(), *(((handle, 0.7),) for handle in adapters), tuple((h, 0.5) for h in adapters)]
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(
            tuple(torch.randint(VOCAB_SIZE, (5 + i,), generator=generator).tolist()), adapters_used
        )
        for i, adapters_used in enumerate(uses)
    ]


def outputs(folder: Path, size: int, **settings: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens of a mixed batch, and the logits of its prompts."""
    adapters = adapters_of(folder)
    driver, ranks = rank_driver(folder, adapters, size, max_lora_rank=MAX_RANK, **settings)
    with ranks:
        tokens = driver.generate(prompts_of(adapters), NUM_TOKENS, prompt_logits=True)
        logits = [rank.sampler.logits for rank in ranks.ranks]
        for other in logits[1:]:
            assert all(torch.equal(a, b) for a, b in zip(logits[0], other, strict=True))
        return tokens, torch.cat(logits[0])


@pytest.fixture(params=["fastest", pytest.param("reference", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setattr(
            loading,
            "select_kernels",
            lambda device, *_, channel=None, **__: ReferenceKernels(device, channel),
        )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_ranks_give_what_one_gives(name: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path)
    tokens, logits = outputs(tmp_path, 1)
    for size in (2, 4) if name not in TWO_ONLY else (2,):
        found, found_logits = outputs(tmp_path, size)
        assert relative_error(found_logits, logits) < TOLERANCES.get(name, TOLERANCE)
        assert found == tokens


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if name == "llama" else pytest.mark.slow)
        for name in BITS
        for precision in PRECISIONS
    ],
    ids=str,
)
def test_one_two_and_four_ranks_give_the_same_bits(
    name: str, precision: dict[str, str], tmp_path: Path
) -> None:
    BITS[name].save(tmp_path)
    tokens, logits = outputs(tmp_path, 1, **precision)
    for size in (2, 4):
        found, found_logits = outputs(tmp_path, size, **precision)
        assert torch.equal(found_logits, logits)
        assert found == tokens
