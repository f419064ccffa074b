"""LLM.stream: outputs as they are computed."""

import pytest

from loraplex import LLM, SamplingParams
from loraplex.core.errors import AdapterNotFoundError, InvalidRequestError, NotReadyError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.eventually import eventually

PROMPT = "What is the capital of France?"
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    small = {"kv_cache_bytes": "8MiB", "num_threads": 1}
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=folder, **small) as llm:
        yield llm


def test_the_pieces_are_the_whole(llm):
    sampling = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    [whole] = llm.generate(PROMPT, sampling)
    outputs = list(llm.stream(PROMPT, sampling))
    assert "".join(output.text for output in outputs) == whole.text
    assert len(outputs) > 1
    assert outputs[-1].timing.num_output_tokens == len(whole.token_ids)
    assert outputs[-1].prompt_token_ids == whole.prompt_token_ids


def test_a_conversation_with_an_adapter(llm):
    chat = [{"role": "user", "content": PROMPT}]
    [whole] = llm.chat(chat, GREEDY, adapter="chinese")
    outputs = list(llm.stream(chat, GREEDY, adapter="chinese"))
    assert "".join(output.text for output in outputs) == whole.text
    assert outputs[-1].prompt_token_ids == whole.prompt_token_ids
    assert [adapter.name for adapter in outputs[-1].adapters] == ["chinese"]


def test_the_shipped_model_has_a_chat_template(llm):
    assert llm.has_chat_template


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_iterator_closed_early_ends_its_request(llm, is_begun):
    outputs = llm.stream(PROMPT, ENDLESS)
    if is_begun:
        next(outputs)
    outputs.close()
    assert eventually(lambda: not llm.stats().num_running and not llm.stats().num_waiting)


@pytest.mark.parametrize(
    ("prompt", "adapter", "error"),
    [
        ("", None, InvalidRequestError),
        ([{"role": "king", "content": "x"}], None, InvalidRequestError),
        (PROMPT, "french", AdapterNotFoundError),
    ],
)
def test_errors_are_those_of_generate(llm, prompt, adapter, error):
    with pytest.raises(error):
        next(llm.stream(prompt, GREEDY, adapter=adapter))


def test_a_stream_of_a_closed_llm_ends_with_an_error(tmp_path):
    with LLM(BASE_PATH, state_dir=tmp_path, kv_cache_bytes="8MiB", num_threads=1) as llm:
        outputs = llm.stream(PROMPT, ENDLESS)
        next(outputs)
    with pytest.raises(NotReadyError, match="stopping"):
        list(outputs)
    with pytest.raises(NotReadyError, match="closed"):
        next(llm.stream(PROMPT))
