"""Stages of a pipeline: tokens and log probabilities have the bits of one stage."""

from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from loraplex.core.adapter import AdapterUse
from loraplex.core.output import EngineOutput
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.memory.kv_salt import kv_salt
from loraplex.models.cache_groups import cache_groups
from loraplex.testing.fake_clock import FakeClock
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.checkpoints import save_random_model, tiny_sizes
from support.families import every
from support.families.case import parameters
from support.random_schedules import RandomAdapters
from support.stage_threads import queue_links, staged

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    # Inputs of each layer are made of the embedding, so such a model has one stage.
    name: case
    for name, case in every.CASES.items()
    if "per_layer_projection" not in case.linears
}
QUICK = ("gemma3", "granite", "opt-350m", "qwen2-moe-windows", "olmo2", "nemotron-h", "qwen3.5")
SETTINGS = RunnerSettings(block_size=4, num_blocks=40, max_num_seqs=6, max_lora_rank=8)
SCHEDULING = SchedulerSettings(
    max_num_batched_tokens=12,
    num_draft_tokens=2,
    batch_scheduler_policy=BatchSchedulerPolicy.MAX_UTILIZATION,
)
Completions = list[tuple[list[int], list[object]]]


def completions(folder: Path, num_stages: int, settings: RunnerSettings = SETTINGS) -> Completions:
    """Return tokens and all log probabilities of a few requests with and without adapters."""
    links = queue_links(num_stages) if num_stages > 1 else [None]
    parts = [load_parts(folder, settings, HostAdapters(), links=link) for link in links]
    adapters = RandomAdapters(HostAdapters(), parts[0].decoder.spec.all_layers, (1, 3, 8))
    runner, loader = staged(parts, lambda source: adapters.make(source))
    clock = FakeClock(1)
    engine = build_engine(runner, loader, clock, SCHEDULING, adapter_host_bytes=1 << 30)
    for source in adapters.sources:
        engine.register_adapter(source)
    requests = [_request(index) for index in range(8)]
    outputs: list[EngineOutput] = []
    for request in requests:
        engine.add(request)
        outputs += engine.step().outputs
    while not engine.is_idle:
        outputs += engine.step().outputs
        engine.check()
        clock.advance(1_000_000)
    engine.close()
    return [_completion(outputs, request) for request in requests]


def _request(index: int) -> EngineRequest:
    digests = [(), ("adapter 0",), ("adapter 1",), ("adapter 2", "adapter 0")][index % 4]
    return EngineRequest(
        request_id=index + 1,
        prompt_token_ids=tuple((index // 2 + 3 * place) % 7 for place in range(5 + 4 * index)),
        task=Generate(
            SamplingParams(
                max_tokens=14,
                temperature=float(index % 2),
                seed=index,
                logprobs=3,
                prompt_logprobs=0 if index == 5 else None,
                ignore_eos=True,
                repetition_penalty=1.3 if index == 3 else 1.0,
            )
        ),
        eos_token_ids=(),
        adapters=tuple(AdapterUse(digest, 1.0) for digest in digests),
        tenant="",
        priority=0,
        deadline_ns=None,
        kv_salt=kv_salt("tiny", "none", tuple((digest, 1.0) for digest in digests), ""),
        arrival_ns=index + 1,
    )


def _completion(
    outputs: list[EngineOutput], request: EngineRequest
) -> tuple[list[int], list[object]]:
    own = [output for output in outputs if output.request_id == request.request_id]
    errors = [output.error for output in own if output.error is not None]
    assert not errors, errors
    deltas = [delta for output in own for delta in output.deltas]
    scores: list[object] = [output.prompt_logprobs for output in own if output.prompt_logprobs]
    scores += [logprob for delta in deltas for logprob in delta.logprobs]
    return [token for delta in deltas for token in delta.token_ids], scores


@pytest.mark.parametrize("name", parameters(CASES, QUICK))
def test_two_stages_have_the_bits_of_one(name: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path)
    expected = completions(tmp_path, 1)
    assert any(tokens for tokens, _ in expected)
    assert completions(tmp_path, 2) == expected


def test_stages_of_an_accelerator_start_without_layers_of_a_cache_group(tmp_path: Path) -> None:
    save_random_model(tmp_path, LlamaConfig(**tiny_sizes(101, num_hidden_layers=4)))
    settings = msgspec.structs.replace(
        SETTINGS, dtype="float32", max_attention_window_size=(9, 9, 64, 64), max_model_len=64
    )
    for index, link in enumerate(queue_links(2)):
        accelerator = HostAccelerator()
        kernels = AcceleratedReference(accelerator)
        parts = load_parts_with(kernels, accelerator, tmp_path, settings, HostAdapters(), link)
        groups = cache_groups(parts.decoder.spec, 64)
        assert [bool(group.layers) for group in groups] == [index == 1, index == 0]
        assert len(parts.capacity.cache_groups) == 2


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_three_stages_of_five_layers(quantization: str, tmp_path: Path) -> None:
    sizes = tiny_sizes(101, num_hidden_layers=5, tie_word_embeddings=True)
    save_random_model(tmp_path, LlamaConfig(**sizes))
    settings = msgspec.structs.replace(SETTINGS, quantization=quantization)
    expected = completions(tmp_path, 1, settings)
    assert completions(tmp_path, 3, settings) == expected
