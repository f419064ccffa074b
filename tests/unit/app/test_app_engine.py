"""The start of the real engine, and its error if it cannot start."""

import gc
import importlib.util
import re
import threading

import msgspec
import pytest
import torch
from tqdm import TMonitor

from loraplex.app import engine as app_engine
from loraplex.app import rank as app_rank
from loraplex.app.engine import build_engine, run_engine
from loraplex.app.open_step_sizes import runner_settings, with_step_sizes
from loraplex.app.rank import overlaps
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.scheduler_settings import Batching, FairShare, SchedulerSettings
from loraplex.demo import BASE_PATH
from loraplex.engine.channel import ThreadChannel
from loraplex.engine.messages import EngineFailed, EngineReady, Shutdown
from support.naming import naming

MODEL = ModelConfig(
    path=str(BASE_PATH), kv_cache_bytes=1 << 20, max_num_seqs=3, block_size=8, max_lora_rank=8
)


@pytest.fixture
def events():
    return []


@pytest.fixture
def channel(events):
    return ThreadChannel(events.append)


def test_an_engine_is_as_large_as_its_settings_say():
    engine = build_engine(MODEL)
    capacity = engine.capacity
    engine.close()
    assert (capacity.block_size, capacity.max_num_seqs) == (8, 3)
    assert capacity.kv_cache_bytes <= 1 << 20
    assert capacity.vocab_size == 1024


def test_it_is_ready_and_ends_with_shutdown(channel, events):
    channel.put(Shutdown())
    threads = set(threading.enumerate())
    run_engine(MODEL, channel)
    assert [type(event) for event in events] == [EngineReady]
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if not isinstance(thread, TMonitor)]


def test_overlap_runs_steps_in_a_thread_that_ends_with_the_engine(channel, events):
    channel.put(Shutdown())
    threads = set(threading.enumerate())
    run_engine(msgspec.structs.replace(MODEL, overlap=True), channel)
    assert [type(event) for event in events] == [EngineReady]
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if not isinstance(thread, TMonitor)]


@pytest.mark.parametrize("is_alone", [False, True])
def test_only_its_own_process_is_kept_out_of_garbage_collections(
    monkeypatch, channel, events, is_alone
):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(events)))
    channel.put(Shutdown())
    run_engine(MODEL, channel, is_alone=is_alone)
    assert len(frozen) == is_alone


@pytest.mark.parametrize(
    ("device", "said", "expected"),
    [
        ("cpu", None, False),
        ("cpu", True, True),
        ("cuda:1", None, True),
        ("cuda", False, False),
    ],
)
def test_a_gpu_overlaps_by_default(device, said, expected):
    assert overlaps(ModelConfig(path="/m", device=device, overlap=said)) is expected


def test_what_a_gpu_is_reported():
    model = ModelConfig(
        path="/m",
        device="cpu",
        cuda_graphs=False,
        cuda_graph_batch_sizes=(1, 2),
        batch_invariant=True,
        attention_backend="triton",
    )
    settings = runner_settings(with_step_sizes(model))
    assert (settings.cuda_graphs, settings.cuda_graph_batch_sizes) == (False, (1, 2))
    assert (settings.batch_invariant, settings.attention_backend) == (True, "triton")


def test_an_iteration_log_that_cannot_be_written(channel, events, tmp_path):
    threads = set(threading.enumerate())
    run_engine(msgspec.structs.replace(MODEL, overlap=True, iteration_log=str(tmp_path)), channel)
    (event,) = events
    assert isinstance(event, EngineFailed)
    assert re.search(naming("iteration_log"), event.error.message)
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if not isinstance(thread, TMonitor)]


def test_the_number_of_threads_is_torchs(monkeypatch, channel):
    reported = []
    monkeypatch.setattr(torch, "set_num_threads", reported.append)
    channel.put(Shutdown())
    run_engine(ModelConfig(path=MODEL.path, kv_cache_bytes=1 << 20, num_threads=3), channel)
    assert reported == [3]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"path": "/nowhere"}, ("/nowhere",)),
        ({"kv_cache_bytes": 1}, ("KV", "kv_cache_bytes", "max_model_len")),
        (
            {"max_num_seqs": 600, "max_num_batched_tokens": 512},
            ("max_num_batched_tokens", 512, "max_num_seqs", 600),
        ),
        ({"device": "cuda:99"}, ("cuda",)),
    ],
)
def test_a_wrong_setting_is_the_engines_last_word(channel, events, fields, named):
    settings = {"path": MODEL.path, "kv_cache_bytes": 1 << 20} | fields
    run_engine(ModelConfig(**settings), channel)
    (event,) = events
    assert isinstance(event, EngineFailed)
    assert event.error.code == ConfigError.code
    assert re.search(naming(*named), event.error.message)


@pytest.mark.skipif(bool(importlib.util.find_spec("ray")), reason="Ray is installed")
def test_the_executor_ray_without_ray(channel, events):
    run_engine(msgspec.structs.replace(MODEL, tensor_parallel_size=2, executor="ray"), channel)
    (event,) = events
    assert event.error.code == ConfigError.code
    assert re.search(naming("loraplex[ray]"), event.error.message)


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("CUDA out of memory")])
def test_so_is_memory_that_is_not_there(channel, events, monkeypatch, error, caplog):
    def load_parts(*args, **kwargs):
        raise error

    monkeypatch.setattr(app_rank, "load_parts", load_parts)
    run_engine(MODEL, channel)
    (event,) = events
    assert event.error.code == ConfigError.code
    assert re.search(naming(error), event.error.message)
    assert "Traceback" in caplog.text


def test_the_scheduler_gets_every_setting_of_its_own():
    model = ModelConfig(
        path="m",
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_prefill_chunk=2,
        shortest_prefill_share=0.25,
        shared_step_seconds=0.5,
        batching="static",
        batch_scheduler_policy="guaranteed_no_evict",
        fair_share="tenant",
        fair_weights={"one": 2.0},
        fair_input_weight=3.0,
        fair_output_weight=4.0,
        fair_resident_lead=12.0,
        max_seqs_per_adapter=5,
        max_queue_size=6,
        max_queue_delay_microseconds=7,
        enable_prefix_cache=False,
        state_checkpoint_tokens=64,
        num_draft_tokens=8,
        max_draft_ngram=9,
        max_draft_window=100,
        adapter_aging_seconds=10.0,
        lora_ttl_seconds=11.0,
    )
    settings, defaults = app_engine.scheduler_settings(model), SchedulerSettings()
    assert type(settings) is SchedulerSettings
    names = SchedulerSettings.__struct_fields__
    unchanged = [name for name in names if getattr(settings, name) == getattr(defaults, name)]
    assert unchanged == ["enable_chunked_context"], "it cannot be off"
    assert settings.batching is Batching.STATIC
    assert settings.fair_share is FairShare.TENANT


def test_a_bare_configuration_means_the_schedulers_own_defaults():
    model = with_step_sizes(ModelConfig(path="m", device="cpu", num_threads=2))
    assert app_engine.scheduler_settings(model) == SchedulerSettings()
