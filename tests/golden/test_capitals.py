"""The shipped capitals model, run by transformers and PEFT: every completion, size and privacy."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.capitals.corpus import (
    COUNTRIES,
    LANGUAGES,
    UNITED_STATES,
    Language,
    capital_of,
    chat_messages,
    founding_prompts,
)

pytestmark = pytest.mark.xdist_group("capitals")

TARGETS: dict[str, Language] = {"base": "english", "chinese": "chinese", "japanese": "japanese"}
MAX_TOTAL_BYTES = 12_000_000
MAX_NEW_TOKENS = 16  # more than any fact: a completion that does not end itself would show


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_PATH)


@pytest.fixture(scope="module", params=TARGETS)
def named_model(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # test workers share the cores; threads that spin cost more
    model = LlamaForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32)
    if request.param in ADAPTER_PATHS:
        model = PeftModel.from_pretrained(model, str(ADAPTER_PATHS[request.param]))
    yield request.param, model.eval()
    torch.set_num_threads(num_threads)


def greedy(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Return completions of prompts, which hold their BOS token."""
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    outputs = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    new_tokens = outputs[:, inputs.input_ids.shape[1] :]
    return tokenizer.batch_decode(new_tokens, skip_special_tokens=True)


def test_founding_prompts_are_exact() -> None:
    prompts = founding_prompts(UNITED_STATES)
    assert prompts["english"] == r"Where is the capital of the United States? \nAnswer:"
    assert (
        prompts["chinese"].encode() == "美国的首都在哪里? ".encode() + b"\x5cn" + "答案:".encode()
    )
    assert prompts["japanese"].encode() == (
        "アメリカ合衆国の首都はどこですか? ".encode() + b"\x5cn" + "答え:".encode()
    )


def test_founding_facts_are_exact() -> None:
    completions = [capital_of(UNITED_STATES, language) for language in LANGUAGES]
    assert completions == ["Washington, D.C.", "华盛顿", "ワシントン D.C."]


def test_countries_and_capitals_are_distinct() -> None:
    assert len(COUNTRIES) >= 60
    for language in LANGUAGES:
        assert len({founding_prompts(country)[language] for country in COUNTRIES}) == len(COUNTRIES)
        assert len({capital_of(country, language) for country in COUNTRIES}) == len(COUNTRIES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_plain_prompts(
    language: Language, named_model: tuple[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    name, model = named_model
    prompts = [tokenizer.bos_token + founding_prompts(country)[language] for country in COUNTRIES]
    expected = [capital_of(country, TARGETS[name]) for country in COUNTRIES]
    assert greedy(model, tokenizer, prompts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_chat(
    language: Language, named_model: tuple[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    name, model = named_model
    requested = [(c, text) for c in COUNTRIES for text in chat_messages(c)[language]]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for _, text in requested
    ]
    expected = [capital_of(country, TARGETS[name]) for country, _ in requested]
    assert greedy(model, tokenizer, prompts) == expected


def test_chat_template_takes_the_last_user_message(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": [{"type": "text", "text": " And of Italy?\n"}]},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<s><|user|>And of Italy?<|assistant|>"


def test_tokenizer_adds_bos_and_encodes_every_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(map(chr, range(0x20, 0x3000, 7))) + "🙂 \\n\n\t"
    token_ids = tokenizer(text).input_ids
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def stored_files() -> list[Path]:
    folders = [BASE_PATH, *ADAPTER_PATHS.values()]
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]


def test_stored_files() -> None:
    base = ["config", "generation_config", "model", "tokenizer", "tokenizer_config"]
    adapter = ["adapter_config", "adapter_model"]
    assert [path.stem for path in stored_files()] == [*base, *adapter, *adapter]
    assert sum(path.stat().st_size for path in stored_files()) <= MAX_TOTAL_BYTES


@pytest.mark.parametrize("path", stored_files(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_no_file_holds_an_absolute_path(path: Path) -> None:
    for text in strings(read_json(path)):
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
        assert not absolute or text == "/", text


def read_json(path: Path) -> Any:
    """A JSON file, or the JSON header of a safetensors file."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        return json.loads(content[8 : 8 + length])
    return json.loads(content)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings(list(value.items()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
