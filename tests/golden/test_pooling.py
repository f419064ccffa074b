"""Vectors of the shipped model: the last hidden states of transformers and PEFT."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.app.builder import base_shapes
from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.output import EngineOutput, FinishReason
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate, Pool, PoolActivation, Task
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.loader import read_host_adapter
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.memory.kv_salt import kv_salt
from loraplex.testing.fake_clock import FakeClock
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


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterSource]:
    """The shipped adapters, by name."""
    state_dir = str(tmp_path_factory.mktemp("state"))
    spec = load_parts(BASE_PATH, SETTINGS, HostAdapters()).decoder.spec
    sources = {}
    for name, path in ADAPTER_PATHS.items():
        request = StageRequest(
            request_id=1, path=str(path), state_dir=state_dir, shapes=base_shapes(spec)
        )
        sources[name] = stage(request).source
    return sources


class Run:
    """Requests that are computed together."""

    def __init__(self, sources: dict[str, AdapterSource], num_stages: int = 1) -> None:
        links = queue_links(num_stages) if num_stages > 1 else [None]
        parts = [load_parts(BASE_PATH, SETTINGS, HostAdapters(), links=link) for link in links]
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


def vector_of_transformers(prompt: tuple[int, ...], name: str) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32).eval()
    inner = model.model
    if name:
        PeftModel.from_pretrained(model, str(ADAPTER_PATHS[name])).eval()
    with torch.no_grad():
        return inner(torch.tensor([prompt])).last_hidden_state[0, -1]


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
        expected = vector_of_transformers(prompt, name)
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
