"""The shipped model through loraplex: every country, language and adapter, in big batches."""

import pytest

from loraplex import LLM, SamplingParams
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.capitals.corpus import COUNTRIES, Language, capital_of, founding_prompts

LANGUAGE_OF: dict[str | None, Language] = {
    None: "english",
    "chinese": "chinese",
    "japanese": "japanese",
}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "float32"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16"},
        {"dtype": "float32", "kv_dtype": "int8"},
        pytest.param({"dtype": "bfloat16", "kv_dtype": "float16"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "float32", "quantization": "int4"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_every_country_in_every_language_by_every_adapter(tmp_path, settings):
    cases = [
        (text, name, capital_of(country, language))
        for country in COUNTRIES
        for name, language in LANGUAGE_OF.items()
        for text in founding_prompts(country).values()
    ]
    prompts, names, expected = zip(*cases, strict=True)
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=tmp_path, **settings) as llm:
        sampling = SamplingParams(max_tokens=24, temperature=0)
        completions = llm.generate(list(prompts), sampling, adapter=list(names))
    assert [one.text for one in completions] == list(expected)
    assert {one.finish_reason for one in completions} == {"stop"}
