"""Beam search against transformers' generate: the search alone, and through an engine."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.clock import SystemClock
from loraplex.core.output import EngineOutput, SequenceDelta
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.scheduling.beams import BeamSearcher, Hypothesis
from loraplex.scheduling.request import StopRules
from support.checkpoints import (
    add_random_adapters,
    host_adapter,
    save_random_model,
    tiny_families,
    tiny_sizes,
)
from support.engine_requests import engine_request
from support.examples import quick_and_slow
from support.instant_loader import InstantLoader

pytestmark = pytest.mark.usefixtures("one_thread")

EARLY_STOPPING: dict[EarlyStopping, Any] = {
    EarlyStopping.AT_ONCE: True,
    EarlyStopping.WHEN_UNLIKELY: False,
    EarlyStopping.NEVER: "never",
}
VOCAB_SIZE = 23
SCORE_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def small_model() -> LlamaForCausalLM:
    """A vocabulary so small that completions end early, and at different lengths."""
    torch.manual_seed(7)
    sizes = tiny_sizes(
        VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.6)).eval()


def request_of(prompt: Sequence[int], eos: Sequence[int], **sampling: Any) -> EngineRequest:
    return engine_request(
        tuple(prompt), SamplingParams(temperature=0.0, **sampling), eos_token_ids=tuple(eos)
    )


@torch.no_grad()
def searched(model: LlamaForCausalLM, request: EngineRequest) -> list[Hypothesis]:
    """The search, fed with the model's own log probabilities."""
    sampling = request.sampling
    assert sampling.beam is not None
    rules = StopRules(request, 64)
    search = BeamSearcher(
        sampling.beam,
        max_tokens=rules.max_tokens,
        num_stop_tokens=rules.num_stop_tokens,
        stop_of=lambda token_ids: rules.after(token_ids, 0),
    )
    while not search.is_over:
        tokens = torch.tensor([[*request.prompt_token_ids, *b.token_ids] for b in search.beams])
        logprobs = model(tokens).logits[:, -1].float().log_softmax(-1)
        if len(search.beams[0].token_ids) < sampling.min_tokens:
            logprobs[:, list(rules.suppressed_token_ids)] = -torch.inf
        found, ids = logprobs.topk(min(search.num_candidates, VOCAB_SIZE))
        search.advance(
            [
                list(zip(i.tolist(), p.tolist(), strict=True))
                for i, p in zip(ids, found, strict=True)
            ]
        )
    return list(search.hypotheses)


@torch.no_grad()
def generated(model: Any, request: EngineRequest) -> list[tuple[list[int], float]]:
    """(tokens, score) of transformers' hypotheses, the best first."""
    sampling = request.sampling
    assert sampling.beam is not None
    prompt = torch.tensor([request.prompt_token_ids])
    eos = list(request.eos_token_ids)
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=sampling.beam.width,
        num_return_sequences=sampling.n,
        length_penalty=sampling.beam.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.beam.early_stopping],
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=-1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    completions = []
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        tokens = sequence[prompt.shape[1] :].tolist()
        completions.append(([t for t in tokens if t != -1], float(score)))
    return completions


def random_settings(seed: int) -> EngineRequest:
    draws = random.Random(seed)
    width = draws.choice([1, 2, 3, 4, 5])
    max_tokens = draws.choice([1, 2, 5, 9, 16])
    return request_of(
        [draws.randrange(VOCAB_SIZE) for _ in range(draws.randint(1, 9))],
        draws.sample(range(VOCAB_SIZE), draws.choice([0, 1, 1, 2, 3])),
        max_tokens=max_tokens,
        min_tokens=draws.choice([0, 0, 0, min(3, max_tokens)]),
        n=draws.randint(1, width),
        beam=BeamSearch(
            width=width,
            length_penalty=draws.choice([1.0, 1.0, 0.0, 2.0, -1.0, 0.6]),
            early_stopping=draws.choice(list(EarlyStopping)),
        ),
    )


@pytest.mark.parametrize("part", range(4))
def test_the_search_alone_agrees_with_transformers(
    small_model: LlamaForCausalLM, part: int
) -> None:
    num_early = 0
    for seed in range(60 * part, 60 * part + 60):
        request = random_settings(seed)
        if request.sampling.beam.width == 1:
            continue  # transformers is greedy then
        expected = generated(small_model, request)
        actual = searched(small_model, request)[: request.sampling.n]
        assert [list(h.beam.token_ids) for h in actual] == [t for t, _ in expected], seed
        for hypothesis, (_, score) in zip(actual, expected, strict=True):
            assert abs(hypothesis.score - score) < SCORE_TOLERANCE * max(1, abs(score)), seed
        num_early += len(expected[0][0]) < request.sampling.max_tokens
    assert num_early > 5, "or ends of completions are not tested"


# ---- through an engine --------------------------------------------------------------------------

ENGINE_VOCAB_SIZE = 61
FAMILIES = tiny_families(ENGINE_VOCAB_SIZE)
ADAPTER = "an adapter"
MAX_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Subject:
    """One checkpoint with one adapter in both implementations."""

    folder: Path
    reference: PeftModel

    def engine(self, *, num_blocks: int = 200, **settings: Any) -> Engine:
        host = HostAdapters()
        runner_settings = RunnerSettings(
            num_blocks=num_blocks, block_size=4, max_num_seqs=16, max_lora_rank=8
        )
        parts = load_parts(self.folder, runner_settings, host)
        adapter = dataclasses.replace(host_adapter(self.reference, ADAPTER), digest=ADAPTER)
        loader = InstantLoader(host, lambda _: adapter)
        engine = build_engine(
            ModelRunner(parts),
            loader,
            SystemClock(),
            SchedulerSettings(**settings),
            adapter_host_bytes=1 << 30,
        )
        engine.register_adapter(
            AdapterSource(ADAPTER, "", adapter.num_bytes, tuple(sorted(pieces_of(adapter))))
        )
        return engine

    def generated(self, request: EngineRequest) -> list[tuple[list[int], float]]:
        if request.adapters:
            return generated(self.reference, request)
        with self.reference.disable_adapter():
            return generated(self.reference, request)


TESTED = quick_and_slow(("mistral-window",), ("llama", "qwen2-windows", "qwen3"))


@pytest.fixture(scope="module", params=TESTED)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    model = save_random_model(folder, FAMILIES[request.param])
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return Subject(folder, add_random_adapters(model, {ADAPTER: lora}))


def beam_request(
    draws: random.Random, request_id: int, max_width: int = 5, **changes: Any
) -> EngineRequest:
    width = draws.randint(2, max_width)
    sampling = {
        "max_tokens": draws.choice([1, 9, MAX_TOKENS]),
        "n": draws.randint(1, width),
        "min_tokens": draws.choice([0, 0, 1]),
        "beam": BeamSearch(
            width=width,
            length_penalty=draws.choice([1.0, 0.0, 2.0, -0.5]),
            early_stopping=draws.choice(list(EarlyStopping)),
        ),
    }
    prompt = [draws.randrange(ENGINE_VOCAB_SIZE) for _ in range(draws.randint(1, 30))]
    eos = draws.sample(range(ENGINE_VOCAB_SIZE), draws.choice([0, 3, 8]))
    request = request_of(prompt, eos, **(sampling | changes))
    uses = (AdapterUse(ADAPTER, 1.0),) if request_id % 2 else ()
    return msgspec.structs.replace(
        request, request_id=request_id, adapters=uses, kv_salt=repr(uses).encode()
    )


def completed(engine: Engine, requests: Sequence[EngineRequest]) -> dict[int, list[SequenceDelta]]:
    """All at the same time."""
    outputs: list[EngineOutput] = []
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        outputs += engine.step().outputs
        engine.check()
    problems = [output.error for output in outputs if output.error is not None]
    assert not problems
    return {
        request.request_id: [
            d for o in outputs if o.request_id == request.request_id for d in o.deltas
        ]
        for request in requests
    }


def check_completions(
    subject: Subject, requests: Sequence[EngineRequest], completions: dict[int, list[SequenceDelta]]
) -> None:
    for request in requests:
        expected = subject.generated(request)
        found = completions[request.request_id]
        assert [list(d.token_ids) for d in found] == [tokens for tokens, _ in expected], request
        beam = request.sampling.beam
        assert beam is not None
        for delta, (tokens, score) in zip(found, expected, strict=True):
            assert delta.cumulative_logprob is not None
            actual = delta.cumulative_logprob / len(tokens) ** beam.length_penalty
            assert abs(actual - score) < SCORE_TOLERANCE * max(1, abs(score)), request


def test_an_engine_agrees_with_transformers(subject: Subject) -> None:
    """Many searches side by side, half of them with an adapter."""
    draws = random.Random("beams")
    requests = [beam_request(draws, request_id) for request_id in range(24)]
    completions = completed(subject.engine(), requests)
    check_completions(subject, requests, completions)
    lengths = {len(d.token_ids) for of in completions.values() for d in of}
    assert len(lengths) > 6, "or the ends of completions are not tested"


def test_preempted_searches_agree(subject: Subject) -> None:
    draws = random.Random("preempted")
    requests = [
        beam_request(draws, request_id, max_width=3, max_tokens=MAX_TOKENS)
        for request_id in range(12)
    ]
    engine = subject.engine(num_blocks=32, enable_prefix_cache=False, max_num_batched_tokens=24)
    check_completions(subject, requests, completed(engine, requests))
    # With a window in each layer hardly anybody needs more and more blocks.
    if engine.capacity.cache_groups[0].spec.window is None:
        assert engine.stats().preemptions > 0


def test_penalties_agree(subject: Subject) -> None:
    draws = random.Random("penalties")
    options = [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}]
    requests = [
        beam_request(draws, request_id, max_tokens=12, **options[request_id // 2 % 2])
        for request_id in range(8)
    ]
    check_completions(subject, requests, completed(subject.engine(), requests))
