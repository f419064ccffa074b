"""Logits that requests want back: which rows, and what when they cannot be written."""

import numpy as np
import pytest
import torch

from loraplex.core.plan import RowAdded, RowStep, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler

VOCAB = 9


def sampler_of(folder, *samplings, tokens=(1, 2, 3, 4), num_prompt_tokens=4):
    sampler = Sampler(VOCAB, device=torch.device("cpu"), logits_dir=folder)
    for slot, sampling in enumerate(samplings):
        sampler.add_row(
            RowAdded(
                slot=slot,
                sequence_id=100 + slot,
                task=Generate(sampling),
                sequence_index=0,
                token_ids=tokens,
                num_prompt_tokens=num_prompt_tokens,
            )
        )
    return sampler


def read(file):
    rows = np.fromfile(file.path, dtype=np.float32).reshape(file.num_rows, VOCAB)
    return torch.from_numpy(rows)


def random_logits(num_rows):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows))


WANTS = SamplingParams(temperature=0.0, repetition_penalty=3.0, return_logits=True)


def test_they_are_the_model_s_own_before_any_edit(tmp_path):
    logits = random_logits(2)
    other = SamplingParams(temperature=0.0)
    results = sampler_of(tmp_path, WANTS, other).sample(
        logits, [RowStep(slot=slot, start=3, num_tokens=1) for slot in range(2)]
    )
    assert torch.equal(read(results[0].logits), logits[:1])
    assert results[1].logits is None
    assert results[0].prompt_logits is None


@pytest.mark.parametrize("greedy", [True, False])
def test_a_greedy_row_without_edits_gives_them_too(tmp_path, greedy):
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0, return_logits=True)
    logits = random_logits(1).bfloat16()
    (result,) = sampler_of(tmp_path, sampling).sample(
        logits, [RowStep(slot=0, start=3, num_tokens=1)]
    )
    assert torch.equal(read(result.logits), logits.float())


def test_of_drafts_only_what_was_accepted(tmp_path):
    logits = torch.zeros(4, VOCAB)
    for position, token_id in enumerate((5, 6, 8, 2)):
        logits[position, token_id] = 9.0
    sampling = SamplingParams(temperature=0.0, return_logits=True)
    step = RowStep(slot=0, start=3, num_tokens=4, draft_token_ids=(5, 6, 7))
    (result,) = sampler_of(tmp_path, sampling).sample(logits, [step])
    assert result.token_ids == (5, 6, 8)
    assert torch.equal(read(result.logits), logits[:3])


def test_of_the_prompt_s_positions_chunk_by_chunk(tmp_path):
    sampling = SamplingParams(temperature=0.0, return_prompt_logits=True)
    sampler = sampler_of(tmp_path, sampling, tokens=(1, 2, 3, 4, 5))
    logits = random_logits(5)
    chunks = [
        RowStep(slot=0, start=0, num_tokens=2, wanted=Wanted.ALL),
        RowStep(slot=0, start=2, num_tokens=3, wanted=Wanted.ALL),
    ]
    first = sampler.sample(logits[:2], chunks[:1])[0]
    last = sampler.sample(logits[2:], chunks[1:])[0]
    assert first.token_ids == ()
    assert len(last.token_ids) == 1
    assert (first.prompt_logprobs, last.prompt_logprobs) == ((), ())
    # The fifth token was an output of an engine that died: it is none of the prompt's.
    assert torch.equal(read(first.prompt_logits), logits[:2])
    assert torch.equal(read(last.prompt_logits), logits[2:4])


def test_what_is_computed_again_replaces_its_own_file(tmp_path):
    step = RowStep(slot=0, start=3, num_tokens=1)
    for num_rows in (1, 1):
        sampler_of(tmp_path, WANTS).sample(random_logits(num_rows), [step])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("folder", ["none", "missing"])
def test_a_row_whose_logits_cannot_be_left_fails_alone(tmp_path, folder):
    place = None if folder == "none" else tmp_path / "missing"
    results = sampler_of(place, WANTS, SamplingParams(temperature=0.0)).sample(
        random_logits(2), [RowStep(slot=slot, start=3, num_tokens=1) for slot in range(2)]
    )
    assert results[0].error is not None
    assert results[0].error.code == "row_failed"
    assert "logits" in results[0].error.message
    assert results[1].error is None
