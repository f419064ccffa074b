"""Which architectures are served, and how a model folder becomes a ModelSpec. Free of torch."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.class_format import num_labels
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.encoder_decoder_config import read_first_ids
from loraplex.models.engine_folder import model_fields
from loraplex.models.families import (
    apertus,
    arcee,
    baichuan,
    bamba,
    bart,
    bloom,
    cohere,
    deepseek,
    ernie,
    exaone4,
    falcon,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    internlm,
    lfm2,
    llama,
    llama4,
    minimax,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nemotron_h,
    olmo,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen_hybrid,
    qwen_moe,
    qwen_vl,
    seed_oss,
    smollm3,
    starcoder2,
    t5,
)
from loraplex.models.family_config import reading_later_positions
from loraplex.models.nearest_family import nearest_family
from loraplex.models.sentence_transformers import read_vector_layers
from loraplex.models.spec import ModelSpec
from loraplex.models.stored_format import read_stored_format

ReadConfig = Callable[[ConfigFields], ModelSpec]

ARCHITECTURES: Final[Mapping[str, ReadConfig]] = MappingProxyType(
    {
        llama.ARCHITECTURE: llama.read_config,
        llama4.ARCHITECTURE: llama4.read_config,
        llama4.WRAPPER: llama4.read_wrapper,
        mistral.ARCHITECTURE: mistral.read_config,
        mistral.ARCHITECTURE_MIXED: mistral.read_config_mixed,
        qwen2.ARCHITECTURE: qwen2.read_config,
        qwen3.ARCHITECTURE: qwen3.read_config,
        gpt2.ARCHITECTURE: gpt2.read_config,
        gemma.ARCHITECTURE: gemma.read_config,
        gemma.ARCHITECTURE_2: gemma.read_config_2,
        gemma.ARCHITECTURE_3: gemma.read_config_3,
        phi.ARCHITECTURE: phi.read_config,
        gpt_neox.ARCHITECTURE: gpt_neox.read_config,
        starcoder2.ARCHITECTURE: starcoder2.read_config,
        cohere.ARCHITECTURE: cohere.read_config,
        cohere.ARCHITECTURE_2: cohere.read_config_2,
        smollm3.ARCHITECTURE: smollm3.read_config,
        internlm.ARCHITECTURE_3: internlm.read_config_3,
        internlm.ARCHITECTURE_2: internlm.read_config_2,
        falcon.ARCHITECTURE: falcon.read_config,
        bloom.ARCHITECTURE: bloom.read_config,
        gptj.ARCHITECTURE: gptj.read_config,
        opt.ARCHITECTURE: opt.read_config,
        baichuan.ARCHITECTURE: baichuan.read_config,
        baichuan.ARCHITECTURE_7B: baichuan.read_config_7b,
        gemma.WRAPPER_3: gemma.read_wrapper_3,
        gemma4.ARCHITECTURE: gemma4.read_config,
        gemma4.WRAPPER: gemma4.read_wrapper,
        gemma4.ARCHITECTURE_UNIFIED: gemma4.read_config_unified,
        gemma4.WRAPPER_UNIFIED: gemma4.read_wrapper_unified,
        phi3.ARCHITECTURE: phi3.read_config,
        mistral3.ARCHITECTURE: mistral3.read_config,
        mistral3.WRAPPER: mistral3.read_wrapper,
        mistral4.ARCHITECTURE: mistral4.read_config,
        mixtral.ARCHITECTURE: mixtral.read_config,
        qwen_moe.ARCHITECTURE_2: qwen_moe.read_config_2,
        qwen_moe.ARCHITECTURE_3: qwen_moe.read_config_3,
        olmoe.ARCHITECTURE: olmoe.read_config,
        granite.ARCHITECTURE: granite.read_config,
        granite.ARCHITECTURE_MOE: granite.read_config_moe,
        granite.ARCHITECTURE_MOE_SHARED: granite.read_config_moe_shared,
        granite.ARCHITECTURE_HYBRID: granite.read_config_hybrid,
        nemotron_h.ARCHITECTURE: nemotron_h.read_config,
        bamba.ARCHITECTURE: bamba.read_config,
        phimoe.ARCHITECTURE: phimoe.read_config,
        phimoe.ARCHITECTURE_PUBLISHED: phimoe.read_config,
        gpt_oss.ARCHITECTURE: gpt_oss.read_config,
        olmo.ARCHITECTURE_2: olmo.read_config_2,
        olmo.ARCHITECTURE_3: olmo.read_config_3,
        glm4.ARCHITECTURE: glm4.read_config,
        qwen_vl.ARCHITECTURE_2_5: qwen_vl.read_config_2_5,
        qwen_vl.ARCHITECTURE_3: qwen_vl.read_config_3,
        qwen_hybrid.ARCHITECTURE_3_5: qwen_hybrid.read_config_3_5,
        qwen_hybrid.WRAPPER_3_5: qwen_hybrid.read_wrapper_3_5,
        qwen_hybrid.ARCHITECTURE_3_5_MOE: qwen_hybrid.read_config_3_5_moe,
        qwen_hybrid.WRAPPER_3_5_MOE: qwen_hybrid.read_wrapper_3_5_moe,
        qwen_hybrid.ARCHITECTURE_NEXT: qwen_hybrid.read_config_next,
        bart.ARCHITECTURE: bart.read_config,
        bart.ARCHITECTURE_MBART: bart.read_config_mbart,
        bart.ARCHITECTURE_M2M100: bart.read_config_m2m100,
        bart.ARCHITECTURE_MARIAN: bart.read_config_marian,
        t5.ARCHITECTURE: t5.read_config,
        t5.ARCHITECTURE_MT5: t5.read_config_mt5,
        t5.ARCHITECTURE_UMT5: t5.read_config_umt5,
        deepseek.ARCHITECTURE_2: deepseek.read_config_2,
        deepseek.ARCHITECTURE_3: deepseek.read_config_3,
        deepseek.ARCHITECTURE_3_2: deepseek.read_config_3_2,
        deepseek.WRAPPER_KIMI: deepseek.read_wrapper_kimi,
        deepseek.WRAPPER_KIMI_SAVED: deepseek.read_wrapper_kimi,
        deepseek.ARCHITECTURE_GLM_FLASH: deepseek.read_config_glm_flash,
        deepseek.ARCHITECTURE_GLM_5: deepseek.read_config_glm_5,
        lfm2.ARCHITECTURE: lfm2.read_config,
        lfm2.ARCHITECTURE_MOE: lfm2.read_config_moe,
        seed_oss.ARCHITECTURE: seed_oss.read_config,
        arcee.ARCHITECTURE: arcee.read_config,
        apertus.ARCHITECTURE: apertus.read_config,
        hunyuan.ARCHITECTURE: hunyuan.read_config,
        exaone4.ARCHITECTURE: exaone4.read_config,
        ernie.ARCHITECTURE: ernie.read_config,
        ernie.ARCHITECTURE_MOE: ernie.read_config_moe,
        glm4_moe.ARCHITECTURE: glm4_moe.read_config,
        glm4_moe.ARCHITECTURE_SOLAR: glm4_moe.read_config_solar,
        minimax.ARCHITECTURE: minimax.read_config,
    }
)

_HEADLESS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LlamaModel": llama.ARCHITECTURE,
        "LlamaBidirectionalModel": llama.ARCHITECTURE,
        "MistralModel": mistral.ARCHITECTURE,
        "Qwen2Model": qwen2.ARCHITECTURE,
        "Qwen3Model": qwen3.ARCHITECTURE,
        "Gemma3TextModel": gemma.ARCHITECTURE_3,
    }
)
"""Architectures of checkpoints without an output layer, by those that have it."""
_EITHER_DIRECTION: Final = tuple(
    name
    for has_head in (llama, mistral, qwen2, qwen3)
    for name in (has_head.ARCHITECTURE, has_head.ARCHITECTURE.replace("ForCausalLM", "Model"))
)
"""Architectures whose positions may read later ones, where config.json has `is_causal` false."""

CLASSIFIERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Gemma3TextForSequenceClassification": gemma.ARCHITECTURE_3,
        "Gemma3ForSequenceClassification": gemma.WRAPPER_3,
        "Qwen3_5TextForSequenceClassification": qwen_hybrid.ARCHITECTURE_3_5,
        "Qwen3_5ForSequenceClassification": qwen_hybrid.WRAPPER_3_5,
        **{
            re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", causal): causal
            for causal in (
                llama.ARCHITECTURE,
                mistral.ARCHITECTURE,
                mistral.ARCHITECTURE_MIXED,
                qwen2.ARCHITECTURE,
                qwen3.ARCHITECTURE,
                gpt2.ARCHITECTURE,
                gemma.ARCHITECTURE,
                gemma.ARCHITECTURE_2,
                phi.ARCHITECTURE,
                gpt_neox.ARCHITECTURE,
                starcoder2.ARCHITECTURE,
                smollm3.ARCHITECTURE,
                falcon.ARCHITECTURE,
                bloom.ARCHITECTURE,
                gptj.ARCHITECTURE,
                opt.ARCHITECTURE,
                phi3.ARCHITECTURE,
                mistral3.ARCHITECTURE,
                mixtral.ARCHITECTURE,
                qwen_moe.ARCHITECTURE_2,
                qwen_moe.ARCHITECTURE_3,
                phimoe.ARCHITECTURE,
                gpt_oss.ARCHITECTURE,
                olmo.ARCHITECTURE_2,
                olmo.ARCHITECTURE_3,
                glm4.ARCHITECTURE,
                qwen_hybrid.ARCHITECTURE_NEXT,
                seed_oss.ARCHITECTURE,
                arcee.ARCHITECTURE,
                hunyuan.ARCHITECTURE,
                exaone4.ARCHITECTURE,
                deepseek.ARCHITECTURE_2,
                deepseek.ARCHITECTURE_3,
                mistral4.ARCHITECTURE,
            )
        },
    }
)
"""Architectures of checkpoints with a classification head instead of an output layer, by those with
the latter: all that transformers has for families of this package."""

_ALTUP: Final = "its layers mix several hidden states, one of which they compute (AltUp)"
_SPEECH: Final = "its encoder reads sound, and only text is served"
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MllamaForConditionalGeneration": "its cross-attention layers read images",
        "Gemma3nForConditionalGeneration": _ALTUP,
        "Gemma3nForCausalLM": _ALTUP,
        "FalconH1ForCausalLM": "its layers have attention and a state space side by side",
        "WhisperForConditionalGeneration": _SPEECH,
        "Phi3SmallForCausalLM": "it is not a Phi 3: its attention is sparse",
        "Phi4MMForCausalLM": "the adapters within it are chosen by images and sound",
    }
)
"""Why some architectures that look like a supported one are not."""


def read_config(folder: Path) -> ModelSpec:
    """Read config.json, and the end tokens of generation_config.json where there is one.

    The folder is a Hugging Face one, one of engine_folder, or a checkpoint of TensorRT-LLM.

    Raises ConfigError for a broken file, UnsupportedModelError for what is not served yet.
    """
    fields = model_fields(folder)
    name, read = _family(folder, fields)
    config = dataclasses.replace(read(fields), stored_format=read_stored_format(folder, fields))
    if not _is_causal(fields, name):
        config = reading_later_positions(config)
    if name not in ARCHITECTURES or not config.is_causal:
        # What reads later positions predicts none.
        config = dataclasses.replace(config, has_lm_head=False, tie_word_embeddings=False)
    if name in CLASSIFIERS:
        config = dataclasses.replace(config, num_labels=num_labels(fields))
    size = config.embedding_size or config.hidden_size
    config = dataclasses.replace(config, vector_layers=read_vector_layers(folder, size))
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        generation = read_fields(generation_path)
        eos_token_ids = generation.integers("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=eos_token_ids or config.eos_token_ids)
        if config.encoder is not None:
            first_ids = read_first_ids(generation, config.vocab_size, *config.encoder.first_ids)
            encoder = dataclasses.replace(config.encoder, first_ids=first_ids)
            config = dataclasses.replace(config, encoder=encoder)
    return config


def _is_causal(fields: ConfigFields, name: str) -> bool:
    """Read `is_causal`. Raises UnsupportedModelError where a family does not compute it."""
    text = fields.table("text_config")
    if text is not None and not text.boolean("is_causal", True):
        raise UnsupportedModelError(f"{text.source}: is_causal false is not supported")
    if name == "LlamaBidirectionalModel":
        return False
    if fields.boolean("is_causal", True):
        return True
    if name not in _EITHER_DIRECTION:
        raise UnsupportedModelError(
            f"{fields.source}: is_causal false (positions read later ones) is not supported in "
            f"{name}; supported: {', '.join(_EITHER_DIRECTION)}"
        )
    return False


def _family(folder: Path, fields: ConfigFields) -> tuple[str, ReadConfig]:
    """Return the checkpoint's architecture, and the reader of its family."""
    names = fields.texts("architectures")
    if not names:
        raise ConfigError(f"{fields.source}: architectures is missing")
    causal = {**_HEADLESS, **CLASSIFIERS}
    read = ARCHITECTURES.get(causal.get(names[0], names[0]))
    if read is None:
        reason = f" ({_REASONS[names[0]]})" if names[0] in _REASONS else ""
        raise UnsupportedModelError(
            f"{fields.source}: architecture {names[0]} is not supported{reason}; "
            f"{nearest_family(folder, names[0], fields, ARCHITECTURES)}; "
            f"supported: {', '.join((*ARCHITECTURES, *causal))}"
        )
    return names[0], read
