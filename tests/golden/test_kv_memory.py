"""Windows, sinks and the host's KV memory against transformers with the mask written out.

A position sees the newest W and the first S ones; in transformers that is a 4D mask over the whole
sequence, computed anew for every token. Pools are so small that blocks are freed, offloaded
and loaded again in the middle of completions.
"""

import contextlib
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex import LLM, SamplingParams
from loraplex.app.engine import build_engine
from loraplex.core.config import ModelConfig
from loraplex.core.errors import PromptTooLongError
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes
from support.engine_requests import engine_request

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
        self, prompt: tuple[int, ...], windows: tuple[int | None, ...], num_sinks: int = 0
    ) -> tuple[int, ...]:
        """Greedy, every token from the whole sequence. Layer i has windows[i % len(windows)]."""
        tokens = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            masks = itertools.cycle(_mask(len(tokens), window, num_sinks) for window in windows)
            with torch.inference_mode(), self._masked_layers(masks):
                output = self.reference(torch.tensor([tokens]), use_cache=False)
            tokens.append(int(output.logits[0, -1].argmax()))
        return tuple(tokens[len(prompt) :])

    @contextlib.contextmanager
    def _masked_layers(self, masks: Iterator[torch.Tensor]) -> Iterator[None]:
        """Give each layer, in their order, the next mask."""

        def masked(
            _layer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**kwargs, "attention_mask": next(masks)}

        hooks = [
            layer.register_forward_pre_hook(masked, with_kwargs=True)
            for layer in self.reference.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def open(self, num_blocks: int, **settings: Any) -> LLM:
        return LLM(
            str(self.folder),
            state_dir=str(self.folder / "state"),
            block_size=BLOCK_SIZE,
            kv_cache_bytes=num_blocks * BLOCK_BYTES,
            **settings,
        )


def _mask(num_tokens: int, window: int | None, num_sinks: int) -> torch.Tensor:
    positions = torch.arange(num_tokens)
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= (distance < window) | (positions < num_sinks)
    return torch.where(seen, 0.0, -torch.inf)[None, None]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(BASE_PATH / "tokenizer.json", folder)
    shutil.copy(BASE_PATH / "tokenizer_config.json", folder)
    return Subject(folder, save_random_model(folder, CONFIG))


@pytest.mark.some(3)
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
    assert completions == [subject.completion(prompt, (window,), num_sinks) for prompt in PROMPTS]
    assert again == completions


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("windows", "num_sinks", "num_blocks", "max_num_batched_tokens"),
    [((9, 128), 0, 38, 8), ((128, 9), 0, 200, 64), ((9, 30), 5, 38, 8), ((2, 128), 3, 38, 8)],
)
def test_windows_of_layers(
    subject: Subject,
    windows: tuple[int, ...],
    num_sinks: int,
    num_blocks: int,
    max_num_batched_tokens: int,
) -> None:
    """Layers with a small window keep few blocks, and the others get the memory."""
    settings = {
        "max_attention_window_size": windows,
        "sink_token_length": num_sinks,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": 3,
        "max_model_len": 128,
    }
    with subject.open(num_blocks, **settings) as llm:
        completions = [completion.token_ids for completion in llm.generate(PROMPTS, SAMPLING)]
        preemptions = llm.stats().preemptions
        again = [completion.token_ids for completion in llm.generate(PROMPTS, SAMPLING)]
        stats = llm.stats()
    limits = tuple(None if window == 128 else window for window in windows)
    assert completions == [subject.completion(prompt, limits, num_sinks) for prompt in PROMPTS]
    assert again == completions
    assert stats.cached_tokens > 0 or num_blocks < 200
    assert stats.blocks_held == 0
    # The sequences have 61 blocks together: 38 for two layers are enough if one layer frees them.
    assert preemptions == 0


def test_a_small_window_frees_blocks_while_its_sequence_runs(subject: Subject) -> None:
    engine = build_engine(
        ModelConfig(
            path=str(subject.folder),
            block_size=BLOCK_SIZE,
            max_attention_window_size=(9, 128),
            max_num_batched_tokens=8,
            max_num_seqs=2,
            max_model_len=128,
        )
    )
    engine.add(engine_request(PROMPTS[2], SAMPLING))
    held: list[tuple[int, ...]] = []
    while not engine.is_idle:
        engine.step()
        engine.check()
        held.append(tuple(group.held for group in engine.stats().cache_groups))
    engine.close()
    most_of_all, most_of_window = map(max, zip(*held, strict=True))
    # Without the last step, which frees all.
    assert most_of_all == -(-(len(PROMPTS[2]) + NUM_NEW_TOKENS - 2) // BLOCK_SIZE)
    assert most_of_window <= 5
    assert held[-1] == (0, 0)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("windows", "num_blocks", "num_host_blocks", "enable_prefix_cache"),
    [
        *itertools.product([(None,)], [26], [0, 6, 60], [False, True]),
        ((9, None), 24, 60, False),
        ((9, None), 24, 6, True),
    ],
)
def test_preempted_sequences_come_back_from_the_host(
    subject: Subject,
    windows: tuple[int | None, ...],
    num_blocks: int,
    num_host_blocks: int,
    enable_prefix_cache: bool,
) -> None:
    settings = {
        "max_attention_window_size": tuple(window or 96 for window in windows),
        "max_model_len": 96,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "kv_cache_host_memory_bytes": num_host_blocks * BLOCK_BYTES,
        "enable_prefix_cache": enable_prefix_cache,
    }
    with subject.open(num_blocks, **settings) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.blocks_on_host == 0
    assert [output.token_ids for output in outputs] == [
        subject.completion(prompt, windows) for prompt in PROMPTS
    ]


def test_what_cannot_fit_even_with_its_window_is_refused(subject: Subject) -> None:
    with (
        subject.open(12, max_attention_window_size=(64,), max_num_seqs=1) as llm,
        pytest.raises(PromptTooLongError, match="the prompt has 50 tokens"),
    ):
        llm.generate([[1] * 50], SAMPLING)
