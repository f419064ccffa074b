"""The worker's grouping, over fakes of the library that do what it was seen to do: the adapter of
a batch is that of the last `generate`.
"""

import asyncio
import json
import os
import sys

import pytest
from comparison.peers.openvino import OpenVinoGenAI

from loraplex.core.errors import ConfigError, UnsupportedFeatureError
from support.naming import naming

OPENVINO = """
class Tensor:
    def __init__(self, values):
        self.ids = values[0].tolist()
"""
GENAI = '''
"""A token is 10 x the adapter's number + its position; log has the batch sizes and adapters."""
import json, os, sys
class SchedulerConfig: pass
class GenerationConfig:
    adapters = None
class Tokenizer:
    def __init__(self, path): pass
class Adapter:
    def __init__(self, path):
        self.number = {"a": 1, "b": 2, "late": 3}[path.split("/")[-2]]
class AdapterConfig:
    def __init__(self, adapters):
        assert all(scale == 2.0 for _, scale in adapters)
        self.adapters = [adapter for adapter, _ in adapters]
class Output:
    def __init__(self, token): self.generated_ids = [token]
class Handle:
    def __init__(self, count): self.count, self.tokens = count, []
    def can_read(self): return bool(self.tokens)
    def read(self): return {0: Output(self.tokens.pop(0))}
class ContinuousBatchingPipeline:
    def __init__(self, model, tokenizer, scheduler, device, **properties):
        # Long enough for all requests of a test to be in one group, however slow the machine is.
        sys.modules["openvino_worker"].OpenVinoWorker.gather_seconds = 0.5
        self.log = open(os.environ["FAKE_LOG"], "a", buffering=1)
        print(json.dumps([sorted(vars(scheduler).items()), sorted(properties)]), file=self.log)
        self.adapter, self.handles = 0, []
    def generate(self, prompts, configs):
        assert not self.handles
        chosen = configs[0].adapters.adapters
        self.adapter = chosen[0].number if chosen else 0
    def add_request(self, number, prompt, config):
        assert config.ignore_eos and not config.do_sample
        handle = Handle(config.max_new_tokens); handle.made = 0
        self.handles.append(handle)
        return handle
    def step(self):
        print(json.dumps([self.adapter, len(self.handles)]), file=self.log)
        for handle in self.handles:
            handle.tokens.append(10 * self.adapter + handle.made)
            handle.made += 1
        self.handles = [h for h in self.handles if h.made < h.count]
'''
EXPORTS = """
import pathlib, sys
pathlib.Path(sys.argv[-1]).mkdir()
pathlib.Path(sys.argv[-1], "command").write_text(" ".join(sys.argv[1:-1]))
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What the fake library logs, one JSON value a line."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.log"))
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "openvino.py").write_text(OPENVINO)
    (tmp_path / "fakes" / "openvino_genai.py").write_text(GENAI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    return lambda: [json.loads(line) for line in (tmp_path / "fake.log").read_text().splitlines()]


@pytest.fixture
def venv(executable, tmp_path, log):
    executable(tmp_path / "venv" / "bin" / "optimum-cli", EXPORTS)
    run = f"import os, sys\nos.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])"
    return executable(tmp_path / "venv" / "bin" / "python", run)


@pytest.fixture
async def running(venv, setup):
    running = await OpenVinoGenAI(venv, 32).start(setup)
    yield running
    await running.stop()


async def test_a_batch_has_one_adapter_and_every_output_is_its_own(running, exchange, log):
    sent = [exchange(adapter) for adapter in (None, 0, None, 1, 0)]
    await asyncio.gather(*(running.send(one) for one in sent))
    texts = [running.read(one).text for one in sent]
    base, first, second = "<0><1><2>", "<10><11><12>", "<20><21><22>"
    assert texts == [base, first, base, second, first]
    steps = log()[1:]
    assert sorted(map(tuple, steps)) == sorted([(0, 2)] * 3 + [(1, 2)] * 3 + [(2, 1)] * 3)


async def test_no_more_run_than_may(running, exchange, log):
    sent = [exchange(num_output_tokens=1 + number) for number in range(6)]
    await asyncio.gather(*(running.send(one) for one in sent))
    assert [running.read(one).num_output_tokens for one in sent] == [1, 2, 3, 4, 5, 6]
    assert max(size for _, size in log()[1:]) == 4


async def test_an_adapter_may_come_late_if_its_modules_are_known(running, exchange, new_adapter):
    index = await running.add_adapter(new_adapter("late"))
    sent = exchange(index)
    await running.send(sent)
    assert running.read(sent).text == "<30><31><32>"
    with pytest.raises(UnsupportedFeatureError, match=naming("['up_proj']", "add_adapter")):
        await running.add_adapter(new_adapter("b", "up_proj"))


async def test_there_is_memory_for_all_sequences_and_no_prefix_cache(running, log):
    scheduler, properties = log()[0]
    assert dict(scheduler)["num_kv_blocks"] == 4 * (64 // 32 + 1)
    assert dict(scheduler)["enable_prefix_caching"] is False
    assert {"INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"} <= set(properties)


@pytest.mark.parametrize("weight_bits", [16, 8])
async def test_narrow_weights_run_in_the_precision_of_the_library(venv, setup, log, weight_bits):
    running = await OpenVinoGenAI(venv, weight_bits).start(setup)
    await running.stop()
    _, properties = log()[0]
    assert properties == ["INFERENCE_NUM_THREADS", "adapters"]


@pytest.mark.parametrize(("weight_bits", "width"), [(16, "fp16"), (8, "int8")])
async def test_the_model_is_exported_once_in_its_width(venv, setup, weight_bits, width):
    for _ in range(2):
        running = await OpenVinoGenAI(venv, weight_bits).start(setup)
        await running.stop()
    command = (setup.cache / "openvino" / width / "command").read_text()
    assert command.endswith(f"--model {setup.model} --weight-format {width}")
    os.remove(venv.parent / "optimum-cli")
    with pytest.raises(ConfigError, match=naming("optimum-cli")):
        await OpenVinoGenAI(venv, 32).start(setup)


def test_a_width_it_has_not_is_reported(venv):
    with pytest.raises(ConfigError, match=naming("[8, 16, 32]", 4)):
        OpenVinoGenAI(venv, 4)
