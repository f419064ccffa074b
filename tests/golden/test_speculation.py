"""Speculative decoding changes no token and no bit of a log probability."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel

from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.clock import SystemClock
from loraplex.core.output import EngineOutput, TokenLogprob
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from support.checkpoints import (
    add_random_adapters,
    host_adapter,
    save_random_model,
    tiny_families,
)
from support.examples import quick_and_slow
from support.instant_loader import InstantLoader

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 29
"""So small that the texts repeat."""
FAMILIES = tiny_families(VOCAB_SIZE)
ADAPTERS = {
    "attention": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
    "mlp": LoraConfig(r=8, lora_alpha=8, target_modules=["up_proj", "down_proj"]),
}
MAX_TOKENS = 40


@dataclasses.dataclass(frozen=True)
class Subject:
    folder: Path
    reference: PeftModel

    def engine(self, dtype: str, num_blocks: int, **settings: Any) -> Engine:
        host = HostAdapters()
        runner_settings = RunnerSettings(
            num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_lora_rank=8, dtype=dtype
        )
        parts = load_parts(self.folder, runner_settings, host)
        adapters = {name: host_adapter(self.reference, name) for name in ADAPTERS}
        loader = InstantLoader(host, lambda source: adapters[source.digest])
        engine = build_engine(
            ModelRunner(parts),
            loader,
            SystemClock(),
            SchedulerSettings(**settings, fair_share="tenant"),  # one: no share preempts another
            adapter_host_bytes=1 << 30,
        )
        for name, adapter in adapters.items():
            source = AdapterSource(name, "", adapter.num_bytes, tuple(sorted(pieces_of(adapter))))
            engine.register_adapter(source)
        return engine


TESTED = quick_and_slow(("llama", "mistral-window"), ("qwen2-windows",))


@pytest.fixture(scope="module", params=TESTED)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    model = save_random_model(folder, FAMILIES[request.param])
    return Subject(folder, add_random_adapters(model, ADAPTERS))


def random_requests() -> list[EngineRequest]:
    draws = random.Random("speculation")
    requests = []
    for index in range(16):
        period = [draws.randrange(VOCAB_SIZE) for _ in range(draws.randint(2, 7))]
        prompt = (period * 10)[: draws.randint(1, 30)]
        uses = draws.choice([(), (AdapterUse("attention", 1.0),), (AdapterUse("mlp", 0.5),)])
        sampling = SamplingParams(
            max_tokens=draws.choice([5, MAX_TOKENS]),
            min_tokens=draws.choice([0, 3]),
            temperature=draws.choice([0.0, 0.0, 0.3]),
            top_p=draws.choice([1.0, 0.9]),
            repetition_penalty=draws.choice([1.0, 1.0, 1.1]),
            no_repeat_ngram_size=draws.choice([0, 0, 4]),
            frequency_penalty=draws.choice([0.0, 0.0, 0.2]),
            n=draws.choice([1, 1, 2]),
            logprobs=draws.choice([0, 2]),
            seed=index,
        )
        requests.append(
            EngineRequest(
                request_id=index,
                prompt_token_ids=tuple(prompt),
                task=Generate(sampling),
                eos_token_ids=(draws.randrange(VOCAB_SIZE),),
                adapters=uses,
                kv_salt=repr(uses).encode(),
                tenant="",
                priority=index % 2,
                arrival_ns=index,
                deadline_ns=None,
            )
        )
    return requests


Completions = dict[tuple[int, int], tuple[list[int], list[TokenLogprob]]]


def completions_of(engine: Engine, requests: Sequence[EngineRequest]) -> Completions:
    outputs: list[EngineOutput] = []
    for index, request in enumerate(requests):
        engine.add(request)
        if index % 3 == 2:
            outputs += engine.step().outputs
    while not engine.is_idle:
        outputs += engine.step().outputs
        engine.check()
    completions: Completions = {}
    for output in outputs:
        assert output.error is None
        for delta in output.deltas:
            tokens, logprobs = completions.setdefault((output.request_id, delta.index), ([], []))
            tokens.extend(delta.token_ids)
            logprobs.extend(delta.logprobs)
    return completions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_token_and_no_bit(subject: Subject, dtype: str) -> None:
    requests = random_requests()
    plain = subject.engine(dtype, 200)
    expected = completions_of(plain, requests)
    assert not plain.stats().draft_tokens
    has_window = plain.capacity.cache_groups[0].spec.window is not None
    few_blocks = 22 if has_window else 24
    for num_blocks, settings in (
        (200, {"num_draft_tokens": 5}),
        (200, {"num_draft_tokens": 1, "max_draft_ngram": 1, "max_num_batched_tokens": 16}),
        (few_blocks, {"num_draft_tokens": 8, "enable_prefix_cache": False}),
    ):
        engine = subject.engine(dtype, num_blocks, **settings)
        assert completions_of(engine, requests) == expected, settings
        stats = engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        # With a window hardly anybody needs more and more blocks.
        assert bool(stats.preemptions) == (num_blocks == few_blocks and not has_window)
        assert stats.steps < plain.stats().steps or len(settings) > 1
