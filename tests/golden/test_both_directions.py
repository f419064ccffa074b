"""Models that read texts in both directions: equal bits in any company, in stages and ranks."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, Qwen2Config

from loraplex import LLM
from loraplex.core.adapter import AdapterUse
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput
from loraplex.core.request import EngineRequest
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate, Pool, PoolKind, Task
from loraplex.demo import BASE_PATH
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.memory.kv_salt import kv_salt
from loraplex.testing.fake_clock import FakeClock
from support.checkpoints import save_random_model, tiny_sizes
from support.random_schedules import RandomAdapters
from support.rank_threads import RankThreads
from support.stage_threads import queue_links, staged

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = tiny_sizes(101, head_dim=16)
SETTINGS = RunnerSettings(
    dtype="float32",
    block_size=4,
    num_blocks=64,
    max_num_seqs=6,
    max_lora_rank=8,
    max_model_len=64,
    max_num_batched_tokens=60,
)
SCHEDULING = SchedulerSettings(max_num_batched_tokens=60, max_prefill_chunk=16)
"""A row may compute 16 tokens of a step, but for whole texts."""
KINDS = (PoolKind.LAST, PoolKind.MEAN, PoolKind.CLS)
TASKS: list[tuple[Task, tuple[int, ...], str]] = [
    (Pool(kind), tuple((3 + 5 * place + length) % 97 for place in range(length)), name)
    for length in (1, 7, 33, 60)
    for kind, name in zip(KINDS, ("", "adapter 0", "adapter 1"), strict=True)
]
DENSE = {"in_features": 64, "out_features": 24, "bias": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of EmbeddingGemma's kind, with a Dense module."""
    folder = tmp_path_factory.mktemp("model")
    config = Gemma3TextConfig(
        **SIZES,
        use_bidirectional_attention=True,
        sliding_window=14,
        layer_types=["sliding_attention", "full_attention"],
    )
    save_random_model(folder, config)
    modules = [
        {"idx": index, "path": name and f"{index}_{name}", "type": f"models.{name or kind}"}
        for index, (name, kind) in enumerate((("", "Transformer"), ("Pooling", ""), ("Dense", "")))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, values in (("1_Pooling", {"pooling_mode": "mean"}), ("2_Dense", DENSE)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    torch.default_generator.manual_seed(4)
    tensors = {"linear.weight": torch.randn(24, 64), "linear.bias": torch.randn(24)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


class Run:
    """Requests that are computed together."""

    def __init__(self, folder: Path, num_stages: int = 1) -> None:
        links = queue_links(num_stages) if num_stages > 1 else [None]
        parts = [load_parts(folder, SETTINGS, HostAdapters(), links=link) for link in links]
        adapters = RandomAdapters(HostAdapters(), parts[0].decoder.spec.all_layers, (3, 8))
        runner, loader = staged(parts, lambda source: adapters.make(source))
        self.engine = build_engine(
            runner, loader, FakeClock(1), SCHEDULING, adapter_host_bytes=1 << 30
        )
        for source in adapters.sources:
            self.engine.register_adapter(source)

    def results(
        self, tasks: Sequence[tuple[Task, tuple[int, ...], str]]
    ) -> Iterator[tuple[bytes, ErrorInfo | None]]:
        """Yield the vector of each (task, prompt, adapter), and the error."""
        for number, task in enumerate(tasks, start=1):
            self.engine.add(request_of(number, *task))
        yield from results_of(self.engine, len(tasks))

    def close(self) -> None:
        self.engine.close()


def request_of(number: int, task: Task, prompt: tuple[int, ...], name: str) -> EngineRequest:
    digests = (name,) if name else ()
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        task=task,
        eos_token_ids=(),
        adapters=tuple(AdapterUse(digest, 1.0) for digest in digests),
        kv_salt=kv_salt("tiny", "none", tuple((digest, 1.0) for digest in digests), ""),
        tenant="",
        priority=0,
        arrival_ns=number,
        deadline_ns=None,
    )


def results_of(engine: Any, number: int) -> Iterator[tuple[bytes, ErrorInfo | None]]:
    outputs: list[EngineOutput] = []
    while not engine.is_idle:
        outputs += engine.step().outputs
        engine.check()
    for request_id in range(1, number + 1):
        own = [output for output in outputs if output.request_id == request_id]
        if own[-1].timing is not None:
            assert own[-1].timing.num_cached_tokens == 0
        yield b"".join(delta.pooled for output in own for delta in output.deltas), own[-1].error


@pytest.fixture(scope="module")
def computed(folder: Path) -> list[bytes]:
    run = Run(folder)
    results = list(run.results([*TASKS, *TASKS]))
    run.close()
    assert {error for _, error in results} == {None}
    vectors = [vector for vector, _ in results]
    assert vectors[: len(TASKS)] == vectors[len(TASKS) :], "no prefix hit, and the same bits"
    assert {len(vector) for vector in vectors} == {4 * 24}
    return vectors[: len(TASKS)]


def test_a_vector_has_the_same_bits_alone_and_in_other_company(
    computed: list[bytes], folder: Path
) -> None:
    run = Run(folder)
    alone = [vector for task in TASKS for vector, _ in run.results([task])]
    backwards = [vector for vector, _ in run.results(TASKS[::-1])]
    run.close()
    assert alone == computed
    assert backwards[::-1] == computed


def test_two_stages_have_the_bits_of_one(computed: list[bytes], folder: Path) -> None:
    run = Run(folder, num_stages=2)
    found = [vector for vector, _ in run.results(TASKS)]
    run.close()
    assert found == computed


class NoLoader:
    """Implements AdapterLoader where there are no adapters."""

    def poll(self) -> list[Any]:
        return []

    def close(self) -> None: ...


def test_two_ranks_have_the_same_vectors(computed: list[bytes], folder: Path) -> None:
    without = [index for index, (_, _, name) in enumerate(TASKS) if not name]
    with RankThreads(folder, SETTINGS, 2) as ranks:
        loader: Any = NoLoader()
        engine = build_engine(ranks, loader, FakeClock(1), SCHEDULING, adapter_host_bytes=1 << 30)
        for number, index in enumerate(without, start=1):
            engine.add(request_of(number, *TASKS[index]))
        found = [vector for vector, _ in results_of(engine, len(without))]
    for index, vector in zip(without, found, strict=True):
        first, second = (np.frombuffer(each, "<f4") for each in (vector, computed[index]))
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)


def test_what_no_step_can_compute_is_refused(folder: Path) -> None:
    run = Run(folder)
    long = (Pool(), tuple(range(61)), "")
    results = list(run.results([long, (Generate(), (1, 2), ""), (Pool(dimensions=25), (1,), "")]))
    run.close()
    errors = [error for _, error in results if error is not None]
    assert [error.code for error in errors] == [
        "prompt_too_long",
        "unsupported_feature",
        "invalid_parameter",
    ]
    assert "max_num_batched_tokens" in errors[0].message
    assert "later" in errors[1].message
    assert "24" in errors[2].message


def test_an_output_layer_that_predicts_nothing_is_not_read(tmp_path: Path) -> None:
    """gte-Qwen2 is stored as a model that generates, but its positions read later ones."""
    config = Qwen2Config(**SIZES, is_causal=False)
    model = save_random_model(tmp_path / "model", config)
    assert "lm_head.weight" in model.state_dict()
    prompt = list(range(3, 20))
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_bytes": 1 << 20}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, tmp_path / "model")
    with LLM(tmp_path / "model", state_dir=tmp_path / "state", **settings) as llm:
        (found,) = llm.embed([prompt])
    cosine = torch.cosine_similarity(torch.from_numpy(found.vector), states, 0)
    assert cosine >= 1 - 1e-6
