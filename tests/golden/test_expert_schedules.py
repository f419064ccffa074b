"""Batches of many adapters on attention, experts, router and shared expert: as transformers.

And the same bits in any company and in any schedule.
"""

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.registry import read_config
from support.examples import num_examples
from support.expert_adapters import RankOf, merged, random_expert_adapter
from support.families.case import VOCAB_SIZE, FamilyCase
from support.families.experts import (
    gpt_oss,
    granite_moe_shared,
    mixtral,
    phimoe,
    qwen2_moe,
)
from support.families.gemma4 import gemma4_experts, with_routers
from support.random_schedules import Schedules
from support.reference_completions import (
    RecordingSampler,
    completion,
    recorded_driver,
    relative_error,
)
from support.step_driver import Prompt, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

# Sizes that int4 divides into groups, and embeddings that let tokens have different experts.
CASES = {
    "mixtral": FamilyCase(
        config=lambda: mixtral(num_local_experts=6, num_hidden_layers=2, intermediate_size=64)
    ),
    "qwen2-moe": FamilyCase(
        embedding_factor=4.0,
        config=lambda: qwen2_moe(
            num_experts=6,
            num_hidden_layers=3,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
    ),
    "phimoe": FamilyCase(
        embedding_factor=4.0,
        # A jitter at which the weights of the two experts depend on the router's logits.
        config=lambda: phimoe(
            num_local_experts=4,
            num_hidden_layers=2,
            intermediate_size=64,
            router_jitter_noise=0.3,
        ),
    ),
    "granite-moe-shared": FamilyCase(
        config=lambda: granite_moe_shared(
            num_local_experts=6,
            num_hidden_layers=2,
            intermediate_size=64,
            shared_intermediate_size=32,
        )
    ),
    "gpt-oss": FamilyCase(
        embedding_factor=4.0,
        config=lambda: gpt_oss(num_local_experts=6, num_hidden_layers=3, intermediate_size=32),
    ),
    "gemma4": FamilyCase(
        prepare=with_routers,
        config=lambda: gemma4_experts(
            num_experts=5,
            num_hidden_layers=3,
            layer_types=None,
            intermediate_size=64,
            moe_intermediate_size=32,
            global_head_dim=32,
        ),
    ),
}
QUICK = ("mixtral", "qwen2-moe")
MAX_RANK = 8
NUM_NEW_TOKENS = 12
TOLERANCE = 1e-4
"""Relative to the largest logit."""
NUM_SCHEDULES = num_examples(0.8)
SCHEDULE_SETTINGS = {
    "block_size": 4,
    "num_blocks": 60,
    "max_num_seqs": 6,
    "max_lora_rank": MAX_RANK,
}
CHANGES = ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"})
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

RANKS: Mapping[str, RankOf] = {
    "attention": lambda _, module, __: 8 * (module in ATTENTION),
    "experts": lambda _, module, __: 4 * module.startswith("experts."),
    "two experts": lambda _, module, expert: (
        3 * (module.startswith("experts.") and expert in (0, 3))
    ),
    "one expert of a layer": lambda layer, module, expert: int(
        (layer, module, expert) == (0, "experts.down_proj", 2)
    ),
    "rank by expert": lambda _, module, expert: (
        min(expert, 5) if module == "experts.up_proj" else 0
    ),
    "router": lambda _, module, __: 2 * (module == "router"),
    "attention and experts": lambda layer, module, expert: (
        5 if module == "q_proj" else module.startswith("experts.") * (expert + layer) % 3
    ),
    "all": lambda layer, module, expert: 1 + (layer + len(module) + expert) % 8,
    "shared expert": lambda _, module, __: 3 * module.startswith("shared_expert"),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    folder: Path
    model: Any
    """That of transformers."""
    adapters: Mapping[int, HostAdapter]
    """Adapters by handle."""

    def driver(self, *, is_scrambled: bool = False) -> tuple[StepDriver, RecordingSampler]:
        settings = {"num_blocks": 160, "max_num_seqs": 32, "max_lora_rank": MAX_RANK}
        return recorded_driver(self.folder, self.adapters, is_scrambled=is_scrambled, **settings)

    @property
    def prompts(self) -> list[Prompt]:
        """Return one for the base, for each adapter, and for sums of two and three."""
        handles = list(self.adapters)
        uses = [
            (),
            *(((handle, 1.0),) for handle in handles),
            ((handles[1], 0.5), (handles[0], 1.5)),
            ((handles[-1], 0.3), (handles[5], -0.7), (handles[2], 2.0)),
        ]
        rng = random.Random(1)
        return [
            Prompt(tuple(rng.randrange(VOCAB_SIZE) for _ in range(5 + i)), adapters)
            for i, adapters in enumerate(uses)
        ]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    model = CASES[request.param].save(folder)
    spec = read_config(folder)
    adapters = [
        random_expert_adapter(spec, f"{name} {seed}", rank_of, seed)
        for seed in range(2)
        for name, rank_of in RANKS.items()
    ]
    used = [adapter for adapter in adapters if adapter.weights]
    assert len(used) >= 16
    return Subject(folder, model, dict(enumerate(used, start=7)))


@pytest.fixture(autouse=True, params=["fastest", pytest.param("reference", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine would choose, or torch alone: both must be right."""
    if request.param == "reference":
        monkeypatch.setattr(
            loading, "select_kernels", lambda device, *_, **__: ReferenceKernels(device)
        )


def test_one_batch_of_all_adapters_is_as_transformers(subject: Subject) -> None:
    """Logits of the prompts and tokens of each row, with the base in the midst."""
    prompts = subject.prompts
    driver, sampler = subject.driver()
    generated = driver.generate(prompts, NUM_NEW_TOKENS, prompt_logits=True)
    of_rows = sampler.logits[0].split([len(prompt.token_ids) for prompt in prompts])
    for prompt, logits, tokens in zip(prompts, of_rows, generated, strict=True):
        adapters = [(subject.adapters[handle], scale) for handle, scale in prompt.adapters]
        with merged(subject.model, adapters) as model:
            expected, expected_tokens = completion(model, prompt, NUM_NEW_TOKENS)
        assert relative_error(logits, expected) < TOLERANCE, adapters
        assert tokens == expected_tokens, adapters


def test_same_bits_alone_in_company_in_chunks_and_in_other_blocks(subject: Subject) -> None:
    prompts = subject.prompts
    driver, sampler = subject.driver()
    alone, last_logits = [], []
    for prompt in prompts:
        alone += driver.generate([prompt], NUM_NEW_TOKENS)
        last_logits.append(sampler.logits[-1])
    driver, sampler = subject.driver(is_scrambled=True)
    assert driver.generate(prompts, NUM_NEW_TOKENS) == alone
    assert torch.equal(sampler.logits[-1], torch.cat(last_logits))
    for chunk_size in (1, 7):
        generated = driver.generate(prompts[::-1], NUM_NEW_TOKENS, chunk_size=chunk_size)
        assert generated == alone[::-1]


def test_each_adapter_changes_the_logits(subject: Subject) -> None:
    """Or the other tests would prove nothing about it."""
    tokens = subject.prompts[-1].token_ids
    prompts = [Prompt(tokens), *(Prompt(tokens, ((h, 1.0),)) for h in subject.adapters)]
    driver, sampler = subject.driver()
    driver.generate(prompts, 1, prompt_logits=True)
    base, *adapted = sampler.logits[-1].split(len(tokens))
    for logits in adapted:
        assert relative_error(logits, base) > 10 * TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("fastest", {}),
        *(pytest.param("fastest", changes, marks=pytest.mark.slow) for changes in CHANGES),
        *(pytest.param("reference", changes, marks=pytest.mark.soak) for changes in ({}, *CHANGES)),
    ],
    indirect=["backend"],
    ids=str,
)
def test_same_bits_preempted_cached_and_replayed(subject: Subject, changes: Any) -> None:
    """Sequences are preempted, find blocks of others, and continue in another engine."""
    schedules = Schedules(
        load_parts(subject.folder, RunnerSettings(**(SCHEDULE_SETTINGS | changes)), HostAdapters()),
        num_requests=12,
        max_prompt_tokens=24,
        max_tokens=20,
        ranks=(8, 5, 8, 7, 8),
    )
    problems = [problem for seed in range(NUM_SCHEDULES) for problem in schedules.run(seed)]
    assert not problems, "\n".join(problems[:20])
    tally = schedules.tally
    assert tally.preemptions > 0
    assert tally.cached_tokens > 0
    assert tally.replays > 0
    assert tally.adapter_evictions > 0
