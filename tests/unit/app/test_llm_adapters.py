"""Adapters through the library: TensorRT-LLM's arrays, versions, aliases, reports."""

import numpy as np
import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.adapters.formats.export import StorageType
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidAdapterError,
    InvalidRequestError,
    InvalidTensorError,
)
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming, refused

PROMPT = "What is the capital of France?"
GREEDY = SamplingParams(max_tokens=24, temperature=0)
OUTPUTS = {"chinese": "巴黎", "japanese": "パリ"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    state_dir = tmp_path_factory.mktemp("state")
    with LLM(BASE_PATH, state_dir=state_dir, kv_cache_bytes="8MiB", num_threads=1) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _leave_no_adapters(llm):
    yield
    for card in llm.adapters():
        llm.remove_adapter(card.name)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """language -> (lora_weights, lora_config), float16."""
    folder = tmp_path_factory.mktemp("pairs")
    made = {}
    for language, path in ADAPTER_PATHS.items():
        write_pair(read_peft(str(path)).rows, folder / language, StorageType.FLOAT16)
        made[language] = tuple(
            np.load(folder / language / f"model.lora_{kind}.npy") for kind in ("weights", "config")
        )
    return made


def send(llm, **which):
    return [output.text.strip() for output in llm.generate([PROMPT] * 2, GREEDY, **which)]


def test_the_first_use_brings_the_weights_and_the_id_is_enough_later(llm, pairs):
    for task_id, language in ((0, "chinese"), (2**64 - 1, "japanese")):
        weights, config = pairs[language]
        # TensorRT-LLM's text.
        with pytest.raises(
            AdapterNotFoundError,
            match=rf"LoRA task {task_id} not found in cache\. Please send LoRA weights with",
        ):
            send(llm, lora_task_id=task_id)
        first = send(llm, lora_task_id=task_id, lora_weights=weights, lora_config=config)
        assert first == send(llm, lora_task_id=task_id) == [OUTPUTS[language]] * 2
    mixed = send(llm, lora_task_id=[0, np.uint64(2**64 - 1)])
    assert mixed == list(OUTPUTS.values())
    assert {card.task_id for card in llm.adapters()} == {0, 2**64 - 1}


def test_other_weights_under_an_id_are_a_new_version(llm, pairs):
    for number, language in enumerate(("chinese", "japanese", "japanese"), start=1):
        weights, config = pairs[language]
        reported = send(llm, lora_task_id=5, lora_weights=weights, lora_config=config)
        assert reported == [OUTPUTS[language]] * 2
        assert llm.adapter("5").version == min(number, 2)
    llm.rollback_adapter("5")
    assert send(llm, lora_task_id=5) == ["巴黎"] * 2


def test_without_an_id_the_weights_mean_themselves(llm, pairs):
    weights = [pairs[language][0] for language in OUTPUTS]
    config = [pairs[language][1] for language in OUTPUTS]
    assert send(llm, lora_weights=weights, lora_config=config) == list(OUTPUTS.values())
    assert all(card.name.startswith("inline-") for card in llm.adapters())


@pytest.mark.parametrize(
    "cast",
    [
        lambda weights: weights.astype(np.float32),
        lambda weights: weights.astype(">f4"),
        lambda weights: weights[0],
        lambda weights: torch.from_numpy(weights),
        lambda weights: torch.from_numpy(weights).to(torch.bfloat16),
        lambda weights: torch.from_numpy(weights).bfloat16().view(torch.int16).numpy().view("V2"),
    ],
)
def test_every_type_of_array(llm, pairs, cast):
    weights, config = pairs["chinese"]
    config = config if cast(weights).ndim == 3 else config[0]
    assert send(llm, lora_task_id=1, lora_weights=cast(weights), lora_config=config)[0] == "巴黎"


def test_what_is_wrong_with_arrays(llm, pairs):
    weights, config = pairs["chinese"]
    both = "Request for LoRA inference must have both lora_weights and lora_keys"
    with pytest.raises(InvalidTensorError, match=both):
        send(llm, lora_task_id=1, lora_weights=weights)
    with pytest.raises(InvalidTensorError, match=both):
        llm.add_adapter(task_id=1, lora_config=config)
    # TensorRT-LLM's text.
    with pytest.raises(InvalidAdapterError, match="Expected  lora keys to have TYPE_INT32"):
        send(llm, lora_task_id=1, lora_weights=weights, lora_config=config.astype(np.int64))
    with refused(InvalidTensorError, "lora_weights", "str", param="lora_weights"):
        send(llm, lora_task_id=1, lora_weights="w", lora_config=config)
    with refused(InvalidRequestError, "lora_task_id", "0 to 2**64 - 1", 1.5, param="lora_task_id"):
        send(llm, lora_task_id=1.5)
    with pytest.raises(InvalidRequestError, match=naming("lora_task_id", "lora_weights")):
        send(llm, adapter="x", lora_task_id=1)
    with pytest.raises(InvalidRequestError, match=naming(3, 2, "lora_task_id")):
        send(llm, lora_task_id=[1, 2, 3])
    assert llm.adapters() == []


def test_add_adapter_takes_arrays(llm, pairs):
    weights, config = pairs["chinese"]
    details = llm.add_adapter(task_id=9, lora_weights=weights, lora_config=config)
    assert (details.name, details.task_id) == ("9", 9)
    nameless = llm.add_adapter(lora_weights=pairs["japanese"][0], lora_config=config)
    assert nameless.name == f"inline-{nameless.digest[:12]}"
    llm.alias_adapter(nameless.name, "ja")
    assert send(llm, adapter=["9", "ja"]) == list(OUTPUTS.values())
    with pytest.raises(InvalidRequestError, match=naming("dry_run", "alias_adapter")):
        llm.add_adapter("zh", lora_weights=weights, lora_config=config)
    with pytest.raises(InvalidRequestError, match=naming("lora_weights", "lora_config")):
        llm.add_adapter("zh")


def test_the_load_contract(llm):
    path = ADAPTER_PATHS["chinese"]
    report = llm.add_adapter("zh", path, dry_run=True, canary=True)
    assert report.is_dry_run
    assert report.canary.largest_difference > 0.1
    assert report.content.device_pages > 0
    assert llm.adapters() == []
    llm.add_adapter("zh", path)
    llm.add_adapter("zh", ADAPTER_PATHS["japanese"], replace=True)
    assert llm.pin_adapter("zh", 1).is_pinned
    assert not llm.pin_adapter("zh", 1, pinned=False).is_pinned
    llm.alias_adapter("zh", "live")
    assert send(llm, adapter="live") == ["パリ"] * 2
    assert llm.rollback_adapter("zh").version == 3
    assert send(llm, adapter="live", load_lora_weights="never") == ["巴黎"] * 2
    assert [v.version for v in llm.adapter("zh").versions] == [3, 2, 1]
    assert send(llm, adapter="zh", load_lora_weights="always") == ["巴黎"] * 2
    with refused(
        InvalidRequestError,
        "auto",
        "always",
        "never",
        "load_lora_weights",
        "sometimes",
        param="load_lora_weights",
    ):
        send(llm, adapter="zh", load_lora_weights="sometimes")
    with pytest.raises(InvalidRequestError, match=naming("drain", "immediate", "soon")):
        llm.remove_adapter("zh", "soon")
    assert llm.remove_adapter("live").is_alias
    assert not llm.remove_adapter("zh", "immediate").is_alias
