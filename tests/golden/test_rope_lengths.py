"""Ropes whose factors depend on a length, against transformers' `generate`, by every schedule.

Prompts lie on both sides of the border and at it, and outputs cross it.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.demo import BASE_PATH
from loraplex.models import rope_config
from support.checkpoints import save_random_model, tiny_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
NUM_NEW_TOKENS = 24
BORDER = 32
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONGROPE},
    "longrope-recomputed": {"rope_parameters": LONGROPE},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER},
}
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]
    recomputes: bool

    def open(self, **settings: Any) -> LLM:
        return LLM(str(self.folder), state_dir=str(self.folder / "state"), **settings)

    def generate(self, llm: LLM) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in llm.generate(self.prompts, SAMPLING)]


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCAB_SIZE, (80,), generator=generator).tolist()
    # One beginning for all: KV of another rotation must not be found in the prefix cache.
    return [tokens[:length] for length in (20, 31, 32, 33, 34, 50, 70)]


@pytest.fixture(scope="module", params=ROPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    recomputes = request.param == "longrope-recomputed"
    folder = tmp_path_factory.mktemp(request.param)
    config = LlamaConfig(**(tiny_sizes(VOCAB_SIZE, head_dim=16) | ROPES[request.param]))
    model = save_random_model(folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    prompts = make_prompts()
    expected = []
    for prompt in prompts:
        if not recomputes:
            model = type(model).from_pretrained(folder)  # dynamic ropes keep the longest length
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            # Without a cache, all positions have the factors of the present length: so has Phi-3,
            # which drops its cache at the border.
            use_cache=not recomputes,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(tuple(ids[0, len(prompt) :].tolist()))
    with pytest.MonkeyPatch.context() as patch:
        if recomputes:
            patch.setattr(rope_config, "RECOMPUTING", {"LlamaForCausalLM"})
        yield Case(folder, prompts, expected, recomputes)


def test_alone(case: Case) -> None:
    with case.open() as llm:
        for prompt, expected in zip(case.prompts, case.expected, strict=True):
            assert llm.generate([prompt], SAMPLING)[0].token_ids == expected, len(prompt)


@pytest.mark.some(8)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"kv_cache_bytes": 14 * BLOCK_BYTES},
        {"kv_cache_bytes": 14 * BLOCK_BYTES, "kv_cache_host_memory_bytes": 40 * BLOCK_BYTES},
        {"num_draft_tokens": 4},
        {"overlap": False},
        {"overlap": True},
        {"block_size": 8, "enable_prefix_cache": False},
        {"batching": "static"},
        {"batch_scheduler_policy": "guaranteed_no_evict", "kv_cache_bytes": 14 * BLOCK_BYTES},
    ],
    ids=str,
)
def test_by_any_schedule(case: Case, settings: dict[str, Any]) -> None:
    with case.open(**settings) as llm:
        for _ in range(2):
            assert case.generate(llm) == case.expected


def test_how_often_a_sequence_is_computed_again(case: Case) -> None:
    """Once, if its output crosses the border; the first token after it decides."""
    crossing = [BORDER - NUM_NEW_TOKENS < len(prompt) <= BORDER for prompt in case.prompts]
    with case.open() as llm:
        case.generate(llm)
        assert llm.stats().preemptions == (sum(crossing) if case.recomputes else 0)


def test_an_output_that_ends_at_the_border_is_not_computed_again(case: Case) -> None:
    with case.open() as llm:
        prompt = case.prompts[0]
        num_tokens = BORDER + 1 - len(prompt)
        sampling = msgspec.structs.replace(SAMPLING, max_tokens=num_tokens)
        (completion,) = llm.generate([prompt], sampling)
        assert completion.token_ids == case.expected[0][:num_tokens]
        assert llm.stats().preemptions == 0
