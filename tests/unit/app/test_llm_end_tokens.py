"""End tokens that an adapter's folder names end the outputs of its own requests."""

import json
import re
import shutil

import pytest

from loraplex import LLM, SamplingParams
from loraplex.core.output import FinishReason
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming

PROMPT = "What is the capital of France?"
SAMPLING = SamplingParams(max_tokens=8, temperature=0)
SMALL = {"kv_cache_bytes": "8MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=tmp_path_factory.mktemp("state"), **SMALL) as llm:
        yield llm


@pytest.fixture
def load(llm, tmp_path):
    """A function that loads the shipped adapter with other files, and returns the card."""

    def run(**files):
        shutil.copytree(ADAPTER_PATHS["chinese"], tmp_path / "a")
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "a" / f"{name}.json").write_text(text)
        return llm.add_adapter("a", tmp_path / "a", replace=True)

    return run


@pytest.mark.parametrize("as_list", [False, True])
def test_ids_end_the_outputs_of_this_adapter_alone(llm, load, as_list):
    (whole,) = llm.generate(PROMPT, SAMPLING, adapter="chinese")
    first = whole.token_ids[0]
    assert len(whole.token_ids) > 1
    card = load(generation_config={"eos_token_id": [first, 7] if as_list else first})
    assert card.digest == llm.adapter("chinese").digest
    assert card.warnings == llm.adapter("chinese").warnings
    ended, other = llm.generate([PROMPT] * 2, SAMPLING, adapter=["a", "chinese"])
    assert (ended.text, ended.finish_reason) == ("", FinishReason.STOP)
    assert other.token_ids == whole.token_ids
    ignoring = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    assert llm.generate(PROMPT, ignoring, adapter="a")[0].token_ids == whole.token_ids[:2]


def test_a_text_is_a_token_of_the_base(llm, load):
    load(tokenizer_config={"eos_token": {"content": "<|user|>"}})
    user = SamplingParams(max_tokens=2, temperature=0, allowed_token_ids=(3,))
    ended, other = llm.generate([PROMPT] * 2, user, adapter=["a", "chinese"])
    assert (ended.finish_reason, other.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config": {"eos_token": "<|nowhere|>"}}, ("<|nowhere|>",)),
        ({"generation_config": {"eos_token_id": 99999}}, (99999,)),
        ({"tokenizer_config": {"eos_token": 5}}, ("eos_token",)),
        ({"generation_config": {"eos_token_id": ["2"]}}, ("eos_token_id",)),
        ({"generation_config": "{"}, ("generation_config.json",)),
    ],
)
def test_what_cannot_be_used_is_reported(llm, load, files, named):
    (found,) = {*load(**files).warnings} - {*llm.adapter("chinese").warnings}
    assert re.search(naming(*named), found)
    assert llm.generate(PROMPT, SAMPLING, adapter="a")[0].text.strip() == "巴黎"
