"""Vectors of the shipped model: the last hidden states of transformers and PEFT."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import base_shapes
from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.output import EngineOutput, FinishReason
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate, Pool, PoolActivation, PoolKind, Task
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.loader import read_host_adapter
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.memory.kv_salt import kv_salt
from loraplex.testing.fake_clock import FakeClock
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.stage_threads import queue_links, staged

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = RunnerSettings(
    dtype="float32",
    block_size=4,
    num_blocks=60,
    max_num_seqs=8,
    max_lora_rank=16,
    max_model_len=32,
)
SCHEDULING = SchedulerSettings(max_num_batched_tokens=12)
"""Prompts are cut into chunks, and share steps with rows that decode."""
PROMPT = tuple(range(20, 37))
LONGEST = tuple(range(40, 72))
GREEDY = Generate(SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))


def tuned(model: Any, folder: Path, **settings: Any) -> Any:
    """Return the model with an adapter of random weights, which is saved."""
    config = LoraConfig(r=4, lora_alpha=8, **{"target_modules": ["q_proj", "up_proj"]} | settings)
    peft = get_peft_model(model.eval(), config)
    torch.default_generator.manual_seed(7)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "score" in name:
                parameter.normal_(std=0.2)
    peft.save_pretrained(str(folder), save_embedding_layers=False)
    return peft


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Models with adapters that have heads of 2 and 77 labels, or change lm_head; their folders."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for name, num_labels in (("two", 2), ("many", 77)):
        model = LlamaForSequenceClassification.from_pretrained(
            BASE_PATH, num_labels=num_labels, dtype=torch.float32
        )
        place = folder / name
        found[name] = (tuned(model, place, task_type=TaskType.SEQ_CLS), place)
    model = LlamaForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32)
    place = folder / "head"
    found["head"] = (tuned(model, place, target_modules=["q_proj", "lm_head"]), place)
    return found


@pytest.fixture(scope="module")
def adapters(
    tmp_path_factory: pytest.TempPathFactory, references: dict[str, tuple[Any, Path]]
) -> dict[str, AdapterSource]:
    """The shipped adapters and those with heads, by name."""
    state_dir = str(tmp_path_factory.mktemp("state"))
    spec = load_parts(BASE_PATH, SETTINGS, HostAdapters()).decoder.spec
    sources = {}
    folders = {name: folder for name, (_, folder) in references.items()}
    for name, path in {**ADAPTER_PATHS, **folders}.items():
        request = StageRequest(
            request_id=1,
            path=str(path),
            state_dir=state_dir,
            shapes=base_shapes(spec),
            limits=StagingLimits(max_ranks=SETTINGS.rank_limits),
        )
        sources[name] = stage(request).source
    return sources


class Run:
    """Requests that are computed together."""

    def __init__(
        self,
        sources: dict[str, AdapterSource],
        num_stages: int = 1,
        num_blocks: int = 60,
        load: Callable[..., RunnerParts] = load_parts,
    ) -> None:
        links = queue_links(num_stages) if num_stages > 1 else [None]
        settings = msgspec.structs.replace(SETTINGS, num_blocks=num_blocks)
        parts = [load(BASE_PATH, settings, HostAdapters(), links=link) for link in links]
        runner, loader = staged(parts, read_host_adapter)
        self._sources = sources
        self._clock = FakeClock(1)
        self._engine = build_engine(
            runner, loader, self._clock, SCHEDULING, adapter_host_bytes=1 << 30
        )
        for source in sources.values():
            self._engine.register_adapter(source)
        self._num_requests = 0

    def results(
        self, tasks: Sequence[tuple[Task, tuple[int, ...], str]]
    ) -> Iterator[tuple[list[int], bytes, int]]:
        """Yield tokens, vector and number of cached tokens of each (task, prompt, adapter)."""
        first = self._num_requests + 1
        for task, prompt, name in tasks:
            self._engine.add(self._request(task, prompt, name))
        outputs: list[EngineOutput] = []
        while not self._engine.is_idle:
            outputs += self._engine.step().outputs
            self._engine.check()
            self._clock.advance(1_000_000)
        for request_id in range(first, self._num_requests + 1):
            own = [output for output in outputs if output.request_id == request_id]
            assert own[-1].error is None, own[-1].error
            assert own[-1].timing is not None
            deltas = [delta for output in own for delta in output.deltas]
            if any(delta.pooled for delta in deltas):
                assert [delta.finish_reason for delta in deltas] == [FinishReason.STOP]
            tokens = [token for delta in deltas for token in delta.token_ids]
            pooled = b"".join(delta.pooled for delta in deltas)
            yield tokens, pooled, own[-1].timing.num_cached_tokens

    @property
    def num_preemptions(self) -> int:
        return self._engine.stats().preemptions

    def close(self) -> None:
        self._engine.close()

    def _request(self, task: Task, prompt: tuple[int, ...], name: str) -> EngineRequest:
        self._num_requests += 1
        digests = [self._sources[name].digest] if name else []
        return EngineRequest(
            request_id=self._num_requests,
            prompt_token_ids=prompt,
            task=task,
            eos_token_ids=(),
            adapters=tuple(AdapterUse(digest, 1.0) for digest in digests),
            kv_salt=kv_salt("demo", "none", tuple((digest, 1.0) for digest in digests), ""),
            tenant="",
            priority=0,
            arrival_ns=self._num_requests,
            deadline_ns=None,
        )


def states_of_transformers(prompt: tuple[int, ...], name: str) -> torch.Tensor:
    """The last hidden states [tokens, hidden]."""
    model = LlamaForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32).eval()
    inner = model.model
    if name:
        PeftModel.from_pretrained(model, str(ADAPTER_PATHS[name])).eval()
    with torch.no_grad():
        return inner(torch.tensor([prompt])).last_hidden_state[0]


NAMES = ("", *ADAPTER_PATHS)
POOLS = [(Pool(), prompt, name) for prompt in (PROMPT, LONGEST) for name in NAMES]
GENERATIONS = [(GREEDY, PROMPT[2:9], name) for name in NAMES]


def floats(pooled: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pooled, "<f4").copy())


@pytest.fixture(scope="module")
def computed(adapters: dict[str, AdapterSource]) -> list[tuple[list[int], bytes, int]]:
    """Results of rows of both tasks in the same steps."""
    run = Run(adapters)
    results = list(run.results([*GENERATIONS, *POOLS, (Pool(), (7,), "")]))
    run.close()
    return results


def test_vectors_are_the_last_hidden_states_of_transformers(computed) -> None:
    for (_, prompt, name), (tokens, pooled, _) in zip(POOLS, computed[len(NAMES) :], strict=False):
        expected = states_of_transformers(prompt, name)[-1]
        assert not tokens
        torch.testing.assert_close(floats(pooled), expected / expected.norm(), rtol=1e-4, atol=1e-5)
    vectors = {pooled for _, pooled, _ in computed[len(NAMES) :]}
    assert len(vectors) == len(POOLS) + 1, "each adapter has its own vectors"


def test_rows_that_generate_have_the_tokens_of_steps_without_vectors(computed, adapters) -> None:
    run = Run(adapters)
    alone = list(run.results(GENERATIONS))
    run.close()
    assert [len(tokens) for tokens, _, _ in alone] == [6] * len(NAMES)
    assert alone == computed[: len(NAMES)]


def test_two_stages_send_the_vectors(computed, adapters) -> None:
    run = Run(adapters, num_stages=2)
    results = list(run.results([*GENERATIONS, *POOLS, (Pool(), (7,), "")]))
    run.close()
    assert [(tokens, pooled) for tokens, pooled, _ in results] == [
        (tokens, pooled) for tokens, pooled, _ in computed
    ]


def test_a_prefix_hit_and_what_is_done_to_a_vector(computed, adapters) -> None:
    run = Run(adapters)
    name = NAMES[1]
    ((_, whole, num_cached),) = run.results([(Pool(normalize=False), PROMPT, name)])
    assert num_cached == 0
    pools = [
        Pool(),
        Pool(normalize=False),
        Pool(dimensions=5),
        Pool(dimensions=5, normalize=False),
        Pool(activation=PoolActivation.SIGMOID, normalize=False),
        Pool(activation=PoolActivation.SOFTMAX, normalize=False),
    ]
    results = list(run.results([(pool, PROMPT, name) for pool in pools]))
    run.close()
    assert all(num_cached == 16 for _, _, num_cached in results)
    vectors = [floats(pooled) for _, pooled, _ in results]
    x = floats(whole)
    first = x[:5]
    expected = [
        x / x.norm(),
        x,
        first / first.norm(),
        first,
        torch.sigmoid(x),
        torch.softmax(x, 0),
    ]
    for found, wanted in zip(vectors, expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert results[1][1] == whole, "a prefix hit changes no bit"
    assert results[0][1] == computed[len(NAMES) + 1][1]


WHOLE_KINDS = (PoolKind.MEAN, PoolKind.WEIGHTED_MEAN, PoolKind.CLS)
WHOLE_POOLS = [
    (Pool(kind, normalize=False), prompt, name)
    for kind in WHOLE_KINDS
    for prompt in (PROMPT[:11], PROMPT[:1])
    for name in NAMES
]


def pooled_by_torch(states: torch.Tensor, kind: PoolKind) -> torch.Tensor:
    if kind is PoolKind.CLS:
        return states[0]
    ones = torch.ones(len(states))
    weights = ones if kind is PoolKind.MEAN else ones.cumsum(0)
    return (weights @ states) / weights.sum()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_whole_prompts_are_pooled_beside_rows_that_generate(computed, adapters, num_stages) -> None:
    run = Run(adapters, num_stages)
    results = list(run.results([*GENERATIONS, *WHOLE_POOLS]))
    again = list(run.results(WHOLE_POOLS))
    run.close()
    assert results[: len(NAMES)] == computed[: len(NAMES)]
    for (pool, prompt, name), (_, pooled, _) in zip(
        WHOLE_POOLS, results[len(NAMES) :], strict=True
    ):
        expected = pooled_by_torch(states_of_transformers(prompt, name), pool.kind)
        found = floats(pooled)
        assert torch.cosine_similarity(found.double(), expected.double(), 0) >= 1 - 1e-6
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [pooled for _, pooled, _ in again] == [pooled for _, pooled, _ in results[len(NAMES) :]]
    assert all(num_cached == 0 for _, _, num_cached in again), "a mean reads every position"


TOKENS = (5, 90, 5, 0)
SCORES = [
    (Pool(PoolKind.SCORE, normalize=False), prompt, name)
    for prompt in (PROMPT, LONGEST, (7,))
    for name in ("two", "many")
]
LOGITS = [
    (Pool(PoolKind.LOGITS, normalize=False, token_ids=TOKENS), prompt, name)
    for prompt in (PROMPT, LONGEST, (7,))
    for name in (*NAMES, "head")
]


def logits_of_transformers(
    references: dict[str, tuple[Any, Path]], prompt: tuple[int, ...], name: str
) -> torch.Tensor:
    """Return the scores of a head, or the logits of the last position."""
    if name in references:
        model = references[name][0]
    else:
        model = LlamaForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32).eval()
        if name:
            model = PeftModel.from_pretrained(model, str(ADAPTER_PATHS[name])).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
    return logits if logits.dim() == 1 else logits[-1][list(TOKENS)]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_scores_of_heads_and_tokens_beside_other_tasks(
    computed, adapters, references, num_stages
) -> None:
    """Rows that generate, embed, classify with 2 and 77 labels, and score tokens, in one batch."""
    run = Run(adapters, num_stages)
    jobs = [*SCORES, *LOGITS]
    results = list(run.results([*GENERATIONS, *POOLS, *jobs]))
    again = list(run.results(jobs[::-1]))[::-1]
    run.close()
    num_others = len(GENERATIONS) + len(POOLS)
    assert [found[:2] for found in results[:num_others]] == [
        found[:2] for found in computed[:num_others]
    ], "scores change nothing of the other rows"
    for (pool, prompt, name), (tokens, pooled, _) in zip(jobs, results[num_others:], strict=True):
        wanted = logits_of_transformers(references, prompt, name)
        assert not tokens
        assert len(floats(pooled)) == {"two": 2, "many": 77}.get(name, len(TOKENS)), pool
        torch.testing.assert_close(floats(pooled), wanted, rtol=1e-4, atol=1e-4)
    assert [pooled for _, pooled, _ in again] == [pooled for _, pooled, _ in results[num_others:]]
    assert any(num_cached for _, _, num_cached in again), "a prefix hit changes no bit"


def test_scores_after_preemptions(adapters, references) -> None:
    """So few blocks that prompts lose theirs in the midst: what is computed again has its bits."""
    jobs = [*GENERATIONS * 2, *SCORES, *GENERATIONS, *LOGITS]
    runs = Run(adapters), Run(adapters, num_blocks=9)
    roomy, tight = ([found[:2] for found in run.results(jobs)] for run in runs)
    assert [run.num_preemptions > 0 for run in runs] == [False, True]
    for run in runs:
        run.close()
    assert tight == roomy


def test_scores_on_an_accelerator(adapters, references) -> None:
    """Heads lie in pinned pages, are copied parallel to the steps, and read on the device."""
    accelerator = HostAccelerator()
    load = functools.partial(load_parts_with, AcceleratedReference(accelerator), accelerator)
    run = Run(adapters, load=load)
    jobs = [*SCORES, *LOGITS]
    results = list(run.results([*GENERATIONS, *jobs]))[len(GENERATIONS) :]
    run.close()
    for (_, prompt, name), (_, pooled, _) in zip(jobs, results, strict=True):
        wanted = logits_of_transformers(references, prompt, name)
        torch.testing.assert_close(floats(pooled), wanted, rtol=1e-4, atol=1e-4)
