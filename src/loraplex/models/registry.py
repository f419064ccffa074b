"""Which architectures are served, and how a model folder becomes a ModelSpec. Free of torch."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.engine_folder import model_fields
from loraplex.models.families import (
    baichuan,
    bloom,
    cohere,
    falcon,
    gemma,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    internlm,
    llama,
    mistral,
    mistral3,
    mixtral,
    olmo,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen_moe,
    qwen_vl,
    smollm3,
    starcoder2,
)
from loraplex.models.spec import ModelSpec
from loraplex.models.stored_format import read_stored_format

ReadConfig = Callable[[ConfigFields], ModelSpec]

ARCHITECTURES: Final[Mapping[str, ReadConfig]] = MappingProxyType(
    {
        llama.ARCHITECTURE: llama.read_config,
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
        phi3.ARCHITECTURE: phi3.read_config,
        mistral3.ARCHITECTURE: mistral3.read_config,
        mistral3.WRAPPER: mistral3.read_wrapper,
        mixtral.ARCHITECTURE: mixtral.read_config,
        qwen_moe.ARCHITECTURE_2: qwen_moe.read_config_2,
        qwen_moe.ARCHITECTURE_3: qwen_moe.read_config_3,
        olmoe.ARCHITECTURE: olmoe.read_config,
        granite.ARCHITECTURE: granite.read_config,
        granite.ARCHITECTURE_MOE: granite.read_config_moe,
        granite.ARCHITECTURE_MOE_SHARED: granite.read_config_moe_shared,
        phimoe.ARCHITECTURE: phimoe.read_config,
        phimoe.ARCHITECTURE_PUBLISHED: phimoe.read_config,
        gpt_oss.ARCHITECTURE: gpt_oss.read_config,
        olmo.ARCHITECTURE_2: olmo.read_config_2,
        olmo.ARCHITECTURE_3: olmo.read_config_3,
        glm4.ARCHITECTURE: glm4.read_config,
        qwen_vl.ARCHITECTURE_2_5: qwen_vl.read_config_2_5,
        qwen_vl.ARCHITECTURE_3: qwen_vl.read_config_3,
    }
)

_LLAMA_4: Final = "its attention is in chunks, and it weighs what experts read, not what they give"
_LATENT: Final = "its keys and values are stored as latent vectors"
_RECURRENT: Final = "some of its layers have a recurrent state instead of attention"
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MllamaForConditionalGeneration": "its cross-attention layers read images",
        "Llama4ForConditionalGeneration": _LLAMA_4,
        "Llama4ForCausalLM": _LLAMA_4,
        "DeepseekV2ForCausalLM": _LATENT,
        "DeepseekV3ForCausalLM": _LATENT,
        "Qwen3NextForCausalLM": _RECURRENT,
        "Qwen3_5MoeForCausalLM": _RECURRENT,
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
    config = dataclasses.replace(
        _family(fields)(fields), stored_format=read_stored_format(folder, fields)
    )
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        eos_token_ids = read_fields(generation_path).integers("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=eos_token_ids or config.eos_token_ids)
    return config


def _family(fields: ConfigFields) -> ReadConfig:
    names = fields.texts("architectures")
    if not names:
        raise ConfigError(f"{fields.source}: architectures is missing")
    read = ARCHITECTURES.get(names[0])
    if read is None:
        reason = f" ({_REASONS[names[0]]})" if names[0] in _REASONS else ""
        raise UnsupportedModelError(
            f"{fields.source}: architecture {names[0]} is not supported{reason}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return read
