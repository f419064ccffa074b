"""Decoding options against transformers' generate, on a tiny random model of each family.

The runner is driven by hand-made plans. Where transformers draws, the kept set has one token.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.capacity import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from support.checkpoints import save_random_model, tiny_families
from support.examples import quick_and_slow
from support.step_driver import Prompt, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW_TOKENS = 40
VOCAB_SIZE = 61
"""Small, so that tokens repeat."""

FAMILIES = tiny_families(VOCAB_SIZE)
GREEDY = {"temperature": 0.0}
SEVERAL_BAD = ((7,), (11, 12), (3, 4, 5), (40,), (41, 42))
BIAS = ((3, 4.0), (9, -6.0), (30, 2.5))

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition penalty": (GREEDY | {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "repetition reward": (GREEDY | {"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "no repeated token": (GREEDY | {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "no repeated pair": (GREEDY | {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "no repeated triple": (GREEDY | {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "sequence bias": (
        GREEDY | {"logit_bias": BIAS},
        {"sequence_bias": {(token_id,): bias for token_id, bias in BIAS}},
    ),
    "everything": (
        GREEDY
        | {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "logit_bias": BIAS,
            "bad_token_ids": SEVERAL_BAD,
        },
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "sequence_bias": {(token_id,): bias for token_id, bias in BIAS},
            "bad_words_ids": [list(run) for run in SEVERAL_BAD],
        },
    ),
    "top-k of one": (
        {"temperature": 1.7, "top_k": 1, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 1.7, "top_k": 1, "repetition_penalty": 1.3},
    ),
    "least top-p": (
        {"temperature": 0.6, "top_p": 1e-6, "seed": 5},
        {"do_sample": True, "temperature": 0.6, "top_p": 1e-6, "top_k": 0},
    ),
    "full min-p": (
        {"temperature": 1.5, "min_p": 1.0, "seed": 6},
        {"do_sample": True, "temperature": 1.5, "min_p": 1.0, "top_k": 0},
    ),
}
"""Ours, and transformers'."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One checkpoint in both implementations."""

    folder: Path
    reference: Any

    def driver(self) -> StepDriver:
        settings = RunnerSettings(num_blocks=200, block_size=8, max_num_seqs=16, max_lora_rank=8)
        return StepDriver(ModelRunner(load_parts(self.folder, settings, HostAdapters())))

    @torch.no_grad()
    def completion(self, prompt: tuple[int, ...], **options: Any) -> list[int]:
        """transformers'."""
        inputs = torch.tensor([prompt])
        output = self.reference.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=0,
            **({"do_sample": False} | options),
        )
        return output[0, len(prompt) :].tolist()


TESTED = quick_and_slow(("mistral-window", "gpt2"), ("llama", "qwen2-windows", "qwen3"))


@pytest.fixture(scope="module", params=TESTED)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    return Subject(folder, save_random_model(folder, FAMILIES[request.param]))


def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


PROMPTS = (prompt_of(21), prompt_of(5))


def greedy(subject: Subject, prompt: tuple[int, ...]) -> list[int]:
    return subject.completion(prompt)


def test_options_alone_and_in_one_batch(subject: Subject) -> None:
    """Each row of one batch has another option; transformers computes each one alone."""
    driver = subject.driver()
    for prompt in PROMPTS:
        plain = greedy(subject, prompt)
        expected = [subject.completion(prompt, **theirs) for _, theirs in OPTIONS.values()]
        prompts = [Prompt(prompt, (), SamplingParams(**ours)) for ours, _ in OPTIONS.values()]
        together = driver.generate(prompts, NUM_NEW_TOKENS)
        assert dict(zip(OPTIONS, together, strict=True)) == dict(
            zip(OPTIONS, expected, strict=True)
        )
        assert driver.generate(prompts[3:4], NUM_NEW_TOKENS) == expected[3:4]
        changes = [name for name, of in zip(OPTIONS, expected, strict=True) if of != plain]
        assert {"repetition penalty", "no repeated pair", "everything"} <= set(changes)


def test_bad_words_that_would_have_come(subject: Subject) -> None:
    """A token, a pair and a triple of the model's own completion, one after the other."""
    driver = subject.driver()
    for prompt in PROMPTS:
        bad: tuple[tuple[int, ...], ...] = ()
        completions = [greedy(subject, prompt)]
        for length in (1, 2, 3):
            bad = (*bad, tuple(completions[-1][4 : 4 + length]))
            sampling = SamplingParams(temperature=0.0, bad_token_ids=bad)
            (generated,) = driver.generate([Prompt(prompt, (), sampling)], NUM_NEW_TOKENS)
            completions.append(subject.completion(prompt, bad_words_ids=[list(run) for run in bad]))
            assert generated == completions[-1]
        assert len({tuple(completion) for completion in completions}) == len(completions)


def test_end_tokens_wait_for_the_minimum(subject: Subject) -> None:
    driver = subject.driver()
    for prompt in PROMPTS:
        plain = greedy(subject, prompt)
        end_ids = [plain[2], plain[5]]
        sampling = SamplingParams(temperature=0.0, min_tokens=9, max_tokens=NUM_NEW_TOKENS)
        expected = subject.completion(prompt, min_new_tokens=9, eos_token_id=end_ids)
        (generated,) = driver.generate(
            [Prompt(prompt, (), sampling, tuple(end_ids))], NUM_NEW_TOKENS
        )
        assert generated[: len(expected)] == expected
        assert len(expected) >= 9
        assert expected != plain[: len(expected)]
