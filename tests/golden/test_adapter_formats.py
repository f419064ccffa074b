"""One adapter in every format: the same tokens; and what we export, PEFT itself reads."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex import LLM, SamplingParams
from loraplex.adapters.formats.export import StorageType
from loraplex.compat.convert.adapters import read_peft, write_lora_file, write_pair, write_peft
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.capitals.corpus import COUNTRIES, LANGUAGES, capital_of, founding_prompts

pytestmark = pytest.mark.xdist_group("capitals")

TASK_IDS = {"chinese": "0", "japanese": "3"}
NUM_COUNTRIES = 6


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    """Every capitals adapter in every format, by a name that contains both."""
    root, made = tmp_path_factory.mktemp("formats"), {}
    for language, folder in ADAPTER_PATHS.items():
        rows = read_peft(str(folder)).rows
        made[f"{language} peft"] = folder
        for storage in StorageType:
            pair = root / f"{language}-{storage}"
            write_pair(rows, pair, storage)
            made[f"{language} pair {storage}"] = pair
        old_name = root / f"{language}-keys"
        shutil.copytree(root / f"{language}-float16", old_name)
        (old_name / "model.lora_config.npy").rename(old_name / "model.lora_keys.npy")
        made[f"{language} keys"] = old_name
        write_lora_file(rows, root / f"{language}.v1.safetensors")
        made[f"{language} llgtrt"] = root / f"{language}.v1.safetensors"
        write_peft(rows, root / f"{language}-copy")
        made[f"{language} copy"] = root / f"{language}-copy"
    return made


def test_the_same_tokens_in_one_batch(converted, tmp_path):
    requested = [
        (name, founding_prompts(country)[language])
        for country in COUNTRIES[:NUM_COUNTRIES]
        for language in LANGUAGES
        for name in converted
    ]
    adapters = {name: str(path) for name, path in converted.items()}
    with LLM(str(BASE_PATH), adapters, state_dir=str(tmp_path)) as llm:
        completions = llm.generate(
            [text for _, text in requested],
            SamplingParams(max_tokens=16, temperature=0),
            adapter=[name for name, _ in requested],
        )
        digests = {card.name: card.digest for card in llm.adapters()}
    found = {
        (name, text): given.token_ids
        for (name, text), given in zip(requested, completions, strict=True)
    }
    for name, text in requested:
        assert found[name, text] == found[f"{name.split()[0]} peft", text], name
    for (name, _), given in zip(requested, completions, strict=True):
        if name.endswith("peft"):
            assert given.text.strip() in {capital_of(c, name.split()[0]) for c in COUNTRIES}
    for language in ADAPTER_PATHS:
        same = {digests[f"{language} {form}"] for form in ("pair float16", "keys", "llgtrt")}
        assert len(same) == 1
        assert digests[f"{language} copy"] == digests[f"{language} peft"] not in same


def test_a_prefetch_folder_s_numbers_are_task_ids(converted, tmp_path):
    folder = tmp_path / "lora_prefetch"
    for language, task_id in TASK_IDS.items():
        shutil.copytree(converted[f"{language} pair float16"], folder / task_id)
    state = str(tmp_path / "state")
    with LLM(str(BASE_PATH), state_dir=state, adapter_dirs=[str(folder)]) as llm:
        cards = {card.name: card.task_id for card in llm.adapters()}
        text = founding_prompts(COUNTRIES[0])["english"]
        greedy = SamplingParams(max_tokens=16, temperature=0)
        given = llm.generate([text] * 2, greedy, adapter=list(cards))
    assert cards == {"0": 0, "3": 3}
    expected = [capital_of(COUNTRIES[0], language) for language in TASK_IDS]
    assert [one.text.strip() for one in given] == expected


def test_peft_reads_what_we_export(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    trained = get_peft_model(
        LlamaForCausalLM(config),
        LoraConfig(
            r=4,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"down_proj": 2, r"layers\.1\.self_attn.q_proj": 3},
            alpha_pattern={"layers.2.self_attn.q_proj": 5},
            exclude_modules=r".*layers\.0\.mlp.*",
        ),
    )
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    trained.save_pretrained(tmp_path / "trained")
    write_peft(read_peft(str(tmp_path / "trained")).rows, tmp_path / "exported")
    fresh = PeftModel.from_pretrained(LlamaForCausalLM(config), str(tmp_path / "exported"))
    expected, found = lora_layers(trained), lora_layers(fresh)
    assert list(found) == list(expected)
    for name, (scale, a, b) in expected.items():
        assert np.float32(found[name][0]) == np.float32(scale)
        assert torch.equal(found[name][1], a)
        assert torch.equal(found[name][2], b)


def lora_layers(model) -> dict[str, tuple[float, torch.Tensor, torch.Tensor]]:
    return {
        name: (
            module.scaling["default"],
            module.lora_A["default"].weight,
            module.lora_B["default"].weight,
        )
        for name, module in model.named_modules()
        if getattr(module, "scaling", None) and hasattr(module, "lora_A")
    }
