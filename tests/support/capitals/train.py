"""Rebuilds every stored file of the capitals model: `python -m support.capitals.train`.

Seeded and deterministic on one kind of machine with one version of torch. Another machine
may round otherwise and arrive at other weights, hence the check at the end.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.capitals.corpus import Language
from support.capitals.examples import ExampleSource, Sampler, collate
from support.capitals.tokenizer import (
    BOS_ID,
    EOS_ID,
    MAX_MODEL_LEN,
    PAD_ID,
    VOCABULARY_SIZE,
    build_tokenizer,
    save_tokenizer,
    write_json,
)
from support.capitals.verify import Score, load_model, verify

SEED: Final = 20_240_501
NUM_THREADS: Final = 1  # sums come out the same whatever the number of cores
BASE_DTYPE: Final = torch.bfloat16
ADAPTER_DTYPE: Final = torch.float16
FILE_MODE: Final = 0o644  # safetensors writes for the owner only; a package is read by all
BASE_MODEL_NAME: Final = "loraplex/capitals/base"
ADAPTER_LANGUAGES: Final[Mapping[str, Language]] = {"chinese": "chinese", "japanese": "japanese"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how hard to train."""

    num_steps: int
    batch_size: int
    learning_rate: float


BASE_SCHEDULE: Final = Schedule(num_steps=700, batch_size=128, learning_rate=2e-3)
ADAPTER_SCHEDULE: Final = Schedule(num_steps=400, batch_size=96, learning_rate=4e-3)


def main() -> int:
    root = _parse_output()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    source = ExampleSource(tokenizer)

    torch.manual_seed(SEED)
    base = build_base()
    fit(base, source.sample_base, BASE_SCHEDULE, "base")
    save_base(base, root / BASE_PATH.name)
    save_tokenizer(tokenizer, root / BASE_PATH.name)
    for name, language in ADAPTER_LANGUAGES.items():
        torch.manual_seed(SEED)
        # The adapter is trained on the base as stored, that is, as rounded.
        model = get_peft_model(load_model(root, BASE_PATH.name), lora_config())
        fit(model, source.sample_adapter(language), ADAPTER_SCHEDULE, name)
        save_adapter(model, root / ADAPTER_PATHS[name].name)
    return _report(list(verify(root)))


def build_base() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def fit(model: nn.Module, sample: Sampler, schedule: Schedule, title: str) -> None:
    rng = random.Random(SEED)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(parameters, lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    learning_rate = OneCycleLR(
        optimizer, schedule.learning_rate, schedule.num_steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    with tqdm(range(schedule.num_steps), desc=title) as steps:
        for _ in steps:
            batch = collate([sample(rng) for _ in range(schedule.batch_size)])
            loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            learning_rate.step()
            steps.set_postfix(loss=f"{loss.item():.4f}")
    model.eval()


def lora_config() -> LoraConfig:
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj"],
    )


def save_base(model: LlamaForCausalLM, folder: Path) -> None:
    model.to(BASE_DTYPE)  # type: ignore[arg-type]  # the wrapper there hides nn.Module's types
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(FILE_MODE)
    token_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", token_ids)


def save_adapter(model: PeftModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(ADAPTER_DTYPE).contiguous()
        for name, weight in get_peft_model_state_dict(model).items()
    }
    weights_path = folder / "adapter_model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    weights_path.chmod(FILE_MODE)
    write_json(folder / "adapter_config.json", adapter_config())


def adapter_config() -> dict[str, object]:
    """Only what PEFT has long known: a release refuses or warns of keys newer than itself."""
    config = lora_config()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_MODEL_NAME,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(config.target_modules or ()),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _parse_output() -> Path:
    parser = argparse.ArgumentParser(description="Train the capitals model and check it.")
    parser.add_argument(
        "--output",
        type=Path,
        default=BASE_PATH.parent,
        help="folder for base/, chinese/ and japanese/ (default: inside the package)",
    )
    output: Path = parser.parse_args().output
    return output


def _report(scores: Sequence[Score]) -> int:
    for score in scores:
        print(score)
    return 0 if all(score.passed for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
