"""A real model as five Triton models: every way to connect them produces the same text."""

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from support.capitals.corpus import COUNTRIES, capital_of, founding_prompts
from support.triton_requests import TRUE, i32, tensors

pytestmark = pytest.mark.xdist_group("server")

TASKS = {"english": None, "chinese": 1, "japanese": 2}
FRANCE = next(country for country in COUNTRIES if country.english == "France")


@pytest.fixture
def triton(server):
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def of_task(task_id: int | None) -> dict[str, Any]:
    return {} if task_id is None else {"lora_task_id": np.array([[task_id]], dtype=np.uint64)}


def whole(triton, model: str, prompt: str, **more: Any) -> str:
    text = np.array([[prompt]], dtype=object)
    inputs = tensors(triton_http, text_input=text, max_tokens=i32(24), **more)
    return triton.infer(model, inputs).as_numpy("text_output")[0].decode()


def split(triton, prompt: str, *, stop: str = "", **more: Any) -> str:
    words = {"STOP_WORDS_DICT": np.array([[stop]], dtype=object)} if stop else {}
    text = np.array([[prompt]], dtype=object)
    inputs = tensors(triton_http, QUERY=text, REQUEST_OUTPUT_LEN=i32(24), **words)
    made = triton.infer("preprocessing", inputs)
    inputs = tensors(
        triton_http,
        input_ids=made.as_numpy("INPUT_ID"),
        input_lengths=made.as_numpy("REQUEST_INPUT_LEN"),
        request_output_len=made.as_numpy("REQUEST_OUTPUT_LEN"),
        end_id=made.as_numpy("OUT_END_ID"),
        pad_id=made.as_numpy("OUT_PAD_ID"),
        stop_words_list=made.as_numpy("STOP_WORDS_IDS"),
        **more,
    )
    tokens = triton.infer("tensorrt_llm", inputs)
    inputs = tensors(
        triton_http,
        TOKENS_BATCH=tokens.as_numpy("output_ids"),
        SEQUENCE_LENGTH=tokens.as_numpy("sequence_length"),
    )
    return triton.infer("postprocessing", inputs).as_numpy("OUTPUT")[0].decode()


@pytest.mark.parametrize("language", TASKS)
@pytest.mark.parametrize("excludes", [False, True])
def test_ensemble_bls_and_the_split_path(triton, language, excludes):
    prompt = founding_prompts(FRANCE)[language]
    more = of_task(TASKS[language])
    if excludes:
        more["exclude_input_in_output"] = TRUE
    text = whole(triton, "ensemble", prompt, **more)
    assert text.endswith(capital_of(FRANCE, language))
    assert text.startswith(prompt) is not excludes
    assert whole(triton, "tensorrt_llm_bls", prompt, **more) == text
    assert split(triton, prompt, **more) == text


def test_a_stop_word_ends_all_three(triton):
    prompt = founding_prompts(FRANCE)["english"]
    stop = capital_of(FRANCE, "english")[:3]
    words = np.array([[stop]], dtype=object)
    text = whole(triton, "ensemble", prompt, stop_words=words)
    assert text.endswith(stop)
    assert whole(triton, "tensorrt_llm_bls", prompt, stop_words=words) == text
