"""Windows, sinks and the host's KV memory against transformers with the mask written out.

A position sees the newest W and the first S ones; in transformers that is a 4D mask over the whole
sequence, computed anew for every token. Pools are so small that blocks are freed, offloaded
and loaded again in the middle of completions.
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex import LLM, SamplingParams
from loraplex.core.errors import PromptTooLongError
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes

NUM_LAYERS = 2
NUM_NEW_TOKENS = 60
BLOCK_SIZE = 4
BLOCK_BYTES = NUM_LAYERS * 2 * 2 * 16 * BLOCK_SIZE * 4
"""Layers, keys and values, KV heads, head size, tokens, bytes."""
CONFIG = LlamaConfig(
    **tiny_sizes(199, num_hidden_layers=NUM_LAYERS, head_dim=16, max_position_embeddings=256),
    attn_implementation="eager",
)
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)
PROMPTS = [
    tuple((7 * i + 13 * n) % 199 for i in range(length)) for n, length in enumerate([3, 21, 34])
]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    folder: Path
    reference: LlamaForCausalLM

    @functools.cache  # noqa: B019
    def completion(
        self, prompt: tuple[int, ...], window: int | None, num_sinks: int
    ) -> tuple[int, ...]:
        """Greedy, every token from the whole sequence."""
        tokens = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            positions = torch.arange(len(tokens))
            distance = positions[:, None] - positions[None, :]
            seen = distance >= 0
            if window is not None:
                seen &= (distance < window) | (positions < num_sinks)
            mask = torch.where(seen, 0.0, -torch.inf)[None, None]
            with torch.inference_mode():
                output = self.reference(
                    torch.tensor([tokens]), attention_mask=mask, use_cache=False
                )
            tokens.append(int(output.logits[0, -1].argmax()))
        return tuple(tokens[len(prompt) :])

    def open(self, num_blocks: int, **settings: Any) -> LLM:
        return LLM(
            str(self.folder),
            state_dir=str(self.folder / "state"),
            block_size=BLOCK_SIZE,
            kv_cache_bytes=num_blocks * BLOCK_BYTES,
            **settings,
        )


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(BASE_PATH / "tokenizer.json", folder)
    shutil.copy(BASE_PATH / "tokenizer_config.json", folder)
    return Subject(folder, save_random_model(folder, CONFIG))


@pytest.mark.parametrize(("window", "num_sinks"), [(9, 0), (9, 5), (2, 3)])
@pytest.mark.parametrize("num_blocks", [14, 200])
def test_a_window_with_sinks(
    subject: Subject, window: int, num_sinks: int, num_blocks: int
) -> None:
    """94 tokens need 24 blocks; with the window 14 hold them all."""
    settings = {
        "max_attention_window_size": (window,),
        "sink_token_length": num_sinks,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 3,
        "max_model_len": 128,
    }
    with subject.open(num_blocks, **settings) as llm:
        completions = [completion.token_ids for completion in llm.generate(PROMPTS, SAMPLING)]
        again = [completion.token_ids for completion in llm.generate(PROMPTS, SAMPLING)]
    assert completions == [subject.completion(prompt, window, num_sinks) for prompt in PROMPTS]
    assert again == completions


def test_a_window_per_layer_keeps_what_one_layer_still_sees(subject: Subject) -> None:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
    }
    with subject.open(60, max_attention_window_size=(9, 128), **settings) as llm:
        (mixed,) = llm.generate(PROMPTS[1:2], SAMPLING)
    with subject.open(60, max_attention_window_size=(9,), **settings) as llm:
        (narrow,) = llm.generate(PROMPTS[1:2], SAMPLING)
    assert narrow.token_ids == subject.completion(PROMPTS[1], 9, 0)
    assert mixed.token_ids not in (narrow.token_ids, subject.completion(PROMPTS[1], None, 0))


@pytest.mark.parametrize("num_host_blocks", [0, 6, 60])
@pytest.mark.parametrize("enable_prefix_cache", [False, True])
def test_preempted_sequences_come_back_from_the_host(
    subject: Subject, num_host_blocks: int, enable_prefix_cache: bool
) -> None:
    settings = {
        "max_model_len": 96,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "kv_cache_host_memory_bytes": num_host_blocks * BLOCK_BYTES,
        "enable_prefix_cache": enable_prefix_cache,
    }
    with subject.open(26, **settings) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.blocks_on_host == 0
    assert [output.token_ids for output in outputs] == [
        subject.completion(prompt, None, 0) for prompt in PROMPTS
    ]


def test_what_cannot_fit_even_with_its_window_is_refused(subject: Subject) -> None:
    with (
        subject.open(12, max_attention_window_size=(64,), max_num_seqs=1) as llm,
        pytest.raises(PromptTooLongError, match="the prompt has 50 tokens"),
    ):
        llm.generate([[1] * 50], SAMPLING)
