"""Outputs of encoder-decoder models have the same bits under preemption and after crashes."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM, SamplingParams
from support.encoder_decoders import CASES, random_inputs, save_adapters, save_case

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS = random_inputs((40, 60, 33, 50, 20, 90))
NUM_NEW_TOKENS = 40
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_model_len": 64,
    "max_lora_rank": 4,
    "num_threads": 1,
    "kv_cache_bytes": 1 << 24,
}
TOO_SMALL = 96
"""Tokens of a KV cache that holds two of the outputs."""

Outputs = list[tuple[tuple[int, ...], list[float]]]


@pytest.fixture(scope="module", params=["flan-t5", pytest.param("bart", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_case(made, CASES[request.param])
    save_adapters(made, CASES[request.param])
    return made


def adapters_of(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in folder.glob("*/adapter_config.json")}


def outputs(folder: Path, state: Path, **settings: Any) -> tuple[Outputs, int]:
    """Return tokens and log probabilities, and the number of preemptions."""
    adapters = adapters_of(folder)
    with LLM(folder, adapters, state_dir=state, **{**SETTINGS, **settings}) as llm:
        made = llm.generate(INPUTS, SAMPLING, adapter=[None, *sorted(adapters), None])
        found = [
            (each.token_ids, [entry.logprob for entry in each.completions[0].logprobs])
            for each in made
        ]
        return found, llm.stats().preemptions


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    found, preemptions = outputs(folder, tmp_path_factory.mktemp("plain"))
    assert preemptions == 0
    return found


@pytest.mark.parametrize("host_bytes", [0, 1 << 22])
def test_preempted_sequences(folder: Path, plain: Outputs, tmp_path: Path, host_bytes: int) -> None:
    """Check those that are encoded again, and those whose blocks move to the host."""
    found, preemptions = outputs(
        folder,
        tmp_path,
        max_tokens_in_paged_kv_cache=TOO_SMALL,
        kv_cache_host_memory_bytes=host_bytes,
    )
    assert preemptions > 0
    assert found == plain


@pytest.mark.slow
def test_two_ranks(folder: Path, plain: Outputs, tmp_path: Path) -> None:
    """Compare ranks of models whose heads they can share."""
    if folder.name.startswith("flan"):
        with pytest.raises(Exception, match="3 query heads"):
            outputs(folder, tmp_path, tensor_parallel_size=2, engine="process")
        return
    found, _ = outputs(folder, tmp_path, tensor_parallel_size=2, engine="process")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]


def test_an_output_survives_a_crash(folder: Path, plain: Outputs, tmp_path: Path) -> None:
    """Kill the engine after the first tokens: the rest is computed anew, of the same input."""
    adapters = adapters_of(folder)
    with LLM(folder, adapters, engine="process", state_dir=tmp_path, **SETTINGS) as llm:
        tokens: list[int] = []
        logprobs: list[float] = []
        is_killed = False
        for output in llm.stream(INPUTS[1], SAMPLING, adapter=min(adapters)):
            for sequence in output.sequences:
                tokens += sequence.token_ids
                logprobs += [entry.logprob for entry in sequence.logprobs]
            if not is_killed:
                engine = llm._model.service.model(llm._model.name).engine
                os.kill(engine._link.pid, signal.SIGKILL)
                is_killed = True
    assert (tuple(tokens), logprobs) == plain[1]
