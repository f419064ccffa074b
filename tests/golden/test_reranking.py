"""Scores of pairs: judgements by two tokens, heads with one label and cosines, as transformers and
PEFT compute them.
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from loraplex import LLM, AsyncLLM, InvalidParameterError, SamplingParams, UnsupportedFeatureError
from loraplex.core.score_format import QWEN3_INSTRUCTION, QWEN3_RERANKER, sigmoid
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes

TOKENIZER = AutoTokenizer.from_pretrained(BASE_PATH)
VOCAB_SIZE = len(TOKENIZER)
SIZES = tiny_sizes(VOCAB_SIZE, head_dim=16) | {"max_position_embeddings": 1024}
CONFIG = Qwen3Config(**SIZES, tie_word_embeddings=False)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_bytes": 8 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "lora_device_bytes": 8 << 20,
}
"""Prompts are cut into chunks, which share steps with rows of other tasks."""
TEMPLATE = (
    "{%- for message in messages if message.role == 'system' -%}I: {{ message.content }}\n"
    "{% endfor -%}"
    "Q: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "D: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}\n"
    "{%- if add_generation_prompt %}A:{% endif -%}"
)
PAIRS = [
    ("capital of France", "Paris is the capital."),
    ("capital of France", "Rome"),
    ("some longer words about rivers", "The Rhine. " * 9),
]
TRUE, FALSE = 40, 41


def write_modules(folder: Path, *names: str) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if not index else f"{index}_{name}",
            "type": f"sentence_transformers.cross_encoder.modules.x.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for index, name in enumerate(names[1:], 1):
        (folder / f"{index}_{name}").mkdir()


def save_base(folder: Path) -> Any:
    model = save_random_model(folder, CONFIG).eval()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    return model


def save_adapter(model: Any, folder: Path, **settings: Any) -> Any:
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **settings)).eval()
    torch.default_generator.manual_seed(5)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(str(folder), save_embedding_layers=False)
    return tuned


def judgement(model: Any, ids: Sequence[int], tokens: tuple[int, int] = (TRUE, FALSE)) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, -1].double()
    return (logits[tokens[0]] - logits[tokens[1]]).item()


def test_judgements_of_a_cross_encoder_folder_between_other_requests(tmp_path: Path) -> None:
    """A LoRA of lm_head counts, which a converted score row would lose."""
    base = save_base(tmp_path / "base")
    write_modules(tmp_path / "base", "Transformer", "LogitScore")
    score = {"true_token_id": TRUE, "false_token_id": FALSE, "module_input_name": "causal_logits"}
    (tmp_path / "base/1_LogitScore/config.json").write_text(json.dumps(score))
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    options = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (tmp_path / "base/sentence_bert_config.json").write_text(json.dumps(options))

    def prompt(pair: tuple[str, str], instruction: str = "") -> list[int]:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("query", "document"), pair, strict=True)
        ]
        return TOKENIZER(
            TOKENIZER.apply_chat_template(
                messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]

    expected = [judgement(base, prompt(pair)) for pair in PAIRS]
    instructed = judgement(base, prompt(PAIRS[0], "be strict"))
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    targets = ["q_proj", "v_proj", "lm_head"]
    tuned = save_adapter(base, tmp_path / "adapter", target_modules=targets)
    queries, documents = zip(*PAIRS, strict=True)

    async def run() -> tuple[Any, ...]:
        adapters = {"a": tmp_path / "adapter"}
        async with AsyncLLM(tmp_path / "base", adapters, state_dir=tmp_path, **SETTINGS) as llm:
            [alone] = await llm.generate(["Hello"], greedy)
            *scores, [between] = await asyncio.gather(
                llm.score(queries, documents),
                llm.score(queries, documents, use_activation=False),
                llm.score(queries, documents, adapter="a", use_activation=False),
                llm.score(*PAIRS[0], instruction="be strict", use_activation=False),
                llm.generate(["Hello"], greedy),
            )
            assert between.token_ids == alone.token_ids
            return tuple(scores)

    found, raw, adapted, strict = asyncio.run(run())
    assert [each.score for each in raw] == pytest.approx(expected, abs=1e-4)
    assert [each.score for each in found] == pytest.approx(list(map(sigmoid, expected)), abs=1e-5)
    assert strict[0].score == pytest.approx(instructed, abs=1e-4)
    wanted = [judgement(tuned, prompt(pair)) for pair in PAIRS]
    assert [each.score for each in adapted] == pytest.approx(wanted, abs=1e-4)
    assert np.abs(np.subtract(wanted, expected)).min() > 1e-3, "the adapter has an effect"
    assert [(each.query, each.document) for each in found] == PAIRS
    assert [each.adapters[0].name for each in adapted] == ["a"] * len(PAIRS)


def test_the_prompt_of_qwen3_reranker(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    no, yes = (TOKENIZER.convert_ids_to_tokens(each) for each in (FALSE, TRUE))
    settings = {"classifier_from_token": [no, yes], "is_original_qwen3_reranker": True}
    texts = [
        QWEN3_RERANKER.format(instruction=instruction, query="q?", document="some text")
        for instruction in (QWEN3_INSTRUCTION, "look for rivers")
    ]
    expected = [
        judgement(base, TOKENIZER(text, add_special_tokens=False)["input_ids"]) for text in texts
    ]
    with LLM(tmp_path, state_dir=tmp_path / "s", score_config=settings, **SETTINGS) as llm:
        found = [
            llm.score("q?", "some text", instruction=instruction, use_activation=False)[0].score
            for instruction in (None, "look for rivers")
        ]
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_head_with_one_label_reads_the_tokenizers_pair(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    torch.default_generator.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1, dtype=torch.float32
    ).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, tmp_path / "model")
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor([TOKENIZER(*pair)["input_ids"]])).logits.item()
            for pair in PAIRS
        ]
    with LLM(tmp_path / "model", state_dir=tmp_path / "state", **SETTINGS) as llm:
        found = llm.score(*zip(*PAIRS, strict=True))
        with pytest.raises(InvalidParameterError, match="instruction"):
            llm.score("a", "b", instruction="c")
    assert [each.score for each in found] == pytest.approx(list(map(sigmoid, expected)), abs=1e-5)


def test_cosines_of_an_embedding_model_with_its_prompts(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    write_modules(tmp_path / "base", "Transformer", "Pooling")
    (tmp_path / "base/1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    prompts = {"prompts": {"query": "Query: ", "document": ""}}
    (tmp_path / "base/config_sentence_transformers.json").write_text(json.dumps(prompts))

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            states = base.model(input_ids=torch.tensor([TOKENIZER(text)["input_ids"]]))
        return states.last_hidden_state[0, -1].double()

    expected = [
        torch.cosine_similarity(vector(f"Query: {query}"), vector(document), 0).item()
        for query, document in PAIRS
    ]
    with LLM(tmp_path / "base", state_dir=tmp_path / "state", **SETTINGS) as llm:
        found = llm.score(*zip(*PAIRS, strict=True))
    assert [each.score for each in found] == pytest.approx(expected, abs=1e-5)


def test_a_folder_that_states_nothing_scores_nothing(tmp_path: Path) -> None:
    save_base(tmp_path)
    refused = pytest.raises(UnsupportedFeatureError, match="classifier_from_token")
    with LLM(tmp_path, state_dir=tmp_path / "s", **SETTINGS) as llm, refused:
        llm.score("a", "b")
