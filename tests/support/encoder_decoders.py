"""Tiny random encoder-decoder models of transformers, and PEFT adapters of them.

All parameters are random, norms, biases and buffers too: zeros or ones would hide their places.
"""

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCAB_SIZE: Final = 240
PAD: Final = 1
T5_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
"""d_model is not num_heads * d_kv, and the encoder is deeper than the decoder."""
BART_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "max_position_embeddings": 200,
    "bos_token_id": 0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class EncoderDecoderCase:
    """One configuration."""

    config: Any
    model_class: Any
    modules: Mapping[str, list[str] | str]
    """target_modules of each adapter by its name."""


_T5_MODULES: Final = {
    "self": r".*(encoder|decoder).*SelfAttention\.(q|k|v|o)",
    "encoder": r".*encoder\.block.*\.(q|k|v|o|wi|wi_0|wi_1|wo)",
    "cross": r".*EncDecAttention\.(q|k|v|o)",
    "inner": r".*DenseReluDense\.(wi|wi_0|wi_1|wo)",
}
_BART_MODULES: Final = {
    "self": r".*self_attn\.(q_proj|k_proj|v_proj|out_proj)",
    "encoder": r".*encoder\.layers.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)",
    "cross": r".*encoder_attn\.(q_proj|k_proj|v_proj|out_proj)",
    "inner": r".*\.(fc1|fc2)",
}


def _t5(config: Any, model_class: Any) -> EncoderDecoderCase:
    return EncoderDecoderCase(config, model_class, _T5_MODULES)


def _bart(config: Any, model_class: Any) -> EncoderDecoderCase:
    return EncoderDecoderCase(config, model_class, _BART_MODULES)


CASES: Final[Mapping[str, EncoderDecoderCase]] = {
    "t5": _t5(T5Config(**T5_SIZES, feed_forward_proj="relu"), T5ForConditionalGeneration),
    "flan-t5": _t5(
        T5Config(**{**T5_SIZES, "tie_word_embeddings": False}, feed_forward_proj="gated-gelu"),
        T5ForConditionalGeneration,
    ),
    "t5-silu": _t5(
        T5Config(
            **T5_SIZES,
            feed_forward_proj="gated-silu",
            relative_attention_num_buckets=12,
            relative_attention_max_distance=20,
        ),
        T5ForConditionalGeneration,
    ),
    "mt5": _t5(MT5Config(**T5_SIZES), MT5ForConditionalGeneration),
    "umt5": _t5(UMT5Config(**T5_SIZES), UMT5ForConditionalGeneration),
    "bart": _bart(
        BartConfig(**{**BART_SIZES, "forced_bos_token_id": 0}), BartForConditionalGeneration
    ),
    "mbart": _bart(
        MBartConfig(**{**BART_SIZES, "forced_bos_token_id": 9}, scale_embedding=True),
        MBartForConditionalGeneration,
    ),
    "m2m100": _bart(
        M2M100Config(**BART_SIZES, scale_embedding=True, activation_function="relu"),
        M2M100ForConditionalGeneration,
    ),
    "marian": _bart(
        MarianConfig(
            **{
                **BART_SIZES,
                "pad_token_id": VOCAB_SIZE - 1,
                "eos_token_id": 0,
                "decoder_start_token_id": VOCAB_SIZE - 1,
            },
            activation_function="swish",
            scale_embedding=True,
        ),
        MarianMTModel,
    ),
}


def save_case(folder: Path, case: EncoderDecoderCase) -> Any:
    """Save the model with a tokenizer of one token per word; return the model."""
    torch.default_generator.manual_seed(1)
    model = case.model_class(case.config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and case.model_class in (MarianMTModel,):
                continue
            scale = 0.05 if "embed_tokens" in name or "shared" in name else 0.2
            noise = torch.randn_like(parameter) * scale
            parameter.copy_(noise + ("norm" in name and name.endswith("weight")))
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.copy_(torch.randn_like(bias))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token i is the word ti."""
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="t3")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "t1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_adapters(folder: Path, case: EncoderDecoderCase) -> dict[str, Any]:
    """Save a random adapter of each kind in a folder of its name; return the models."""
    made: dict[str, Any] = {}
    for name, targets in case.modules.items():
        config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="SEQ_2_SEQ_LM")
        model = get_peft_model(case.model_class.from_pretrained(folder).eval(), config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(str(folder / name))
        made[name] = model.eval()
    return made


def random_inputs(lengths: tuple[int, ...]) -> list[list[int]]:
    draws = random.Random("encoder inputs")
    return [[draws.randrange(4, VOCAB_SIZE - 1) for _ in range(length)] for length in lengths]
