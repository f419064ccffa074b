"""Checkpoints that the formats' own programs write: bitsandbytes and compressed-tensors.

Each function replaces the float32 model of a folder, and returns the weights of its quantised
layers as the program itself decodes them, of the type in which it does.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from support.quantized_checkpoints import CASES, quantize_folder

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[Path], Tensors]

_models: Any = AutoModelForCausalLM
_bits_and_bytes_config: Any = BitsAndBytesConfig
_LINEAR = "Linear"
"""Target of a scheme: the class of modules."""


def _load(folder: Path, **options: Any) -> Any:
    return _models.from_pretrained(folder, dtype=torch.float32, **options)


def _bitsandbytes(folder: Path, **options: Any) -> Tensors:
    """options: of BitsAndBytesConfig."""
    model = _load(folder, quantization_config=_bits_and_bytes_config(**options), device_map="cpu")
    model.save_pretrained(folder)
    decoded = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, Linear4bit):
            decoded[name] = _dequantized_4bit(weight)
        elif isinstance(module, Linear8bitLt):
            decoded[name] = int8_vectorwise_dequant(weight.data, weight.SCB)
    return {f"{name}.weight": weight for name, weight in decoded.items()}


def _dequantized_4bit(weight: Any) -> torch.Tensor:
    """Return a weight, decoded as one row: 0.50.2 takes a wrong scale where a block crosses rows.

    Its decoder for CPUs starts the count of blocks anew in each row, which its encoder does not.
    """
    state = copy.copy(weight.quant_state)
    state.shape = torch.Size((1, state.shape.numel()))
    decoded: torch.Tensor = dequantize_4bit(weight.data, state)
    return decoded.view(weight.quant_state.shape)


def _compressed_tensors(
    folder: Path, *schemes: QuantizationScheme, ignored: Sequence[str]
) -> Tensors:
    model = _load(folder)
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=[*ignored]))
    quantized = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }
    for module in quantized.values():
        _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {f"{name}.weight": module.weight.data for name, module in quantized.items()}


def _set_scales(module: Any) -> None:
    """Set a module's scales, and zeros, from the extremes of its weight."""
    weight, form = module.weight.data, module.quantization_scheme.weights
    whole = None
    if hasattr(module, "weight_global_scale"):
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(whole)
    blocks, axes = _blocks(weight, form)
    found = calculate_qparams(blocks.amin(axes), blocks.amax(axes), form, global_scale=whole)
    for name, values in zip(("weight_scale", "weight_zero_point"), found, strict=True):
        if hasattr(module, name):
            parameter = getattr(module, name)
            parameter.data.copy_(values.reshape(parameter.shape))


def _blocks(weight: torch.Tensor, form: QuantizationArgs) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the weight in blocks, and the axes of numbers that share a scale."""
    if form.group_size:
        return weight.view(len(weight), -1, form.group_size), (-1,)
    if form.block_structure:
        height, width = form.block_structure
        pads = (0, -weight.shape[1] % width, 0, -weight.shape[0] % height)
        padded = torch.nn.functional.pad(weight, pads)
        rows, columns = padded.shape[0] // height, padded.shape[1] // width
        return padded.view(rows, height, columns, width), (1, 3)
    return weight, (1,) if form.strategy == "channel" else (0, 1)


def _preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, [_LINEAR])


def _scheme(*targets: str, **weights: Any) -> QuantizationScheme:
    """weights: arguments of QuantizationArgs."""
    return QuantizationScheme(
        targets=list(targets or (_LINEAR,)), weights=QuantizationArgs(**weights)
    )


def _grouped(bits: int, size: int, *targets: str, symmetric: bool = True) -> QuantizationScheme:
    return _scheme(*targets, num_bits=bits, strategy="group", group_size=size, symmetric=symmetric)


def _channels(bits: int, kind: str = "int", *, symmetric: bool = True) -> QuantizationScheme:
    return _scheme(num_bits=bits, type=kind, strategy="channel", symmetric=symmetric)


def _ct(
    *schemes: QuantizationScheme, ignored: Sequence[str] = ("lm_head", "model.layers.1.mlp.up_proj")
) -> Quantize:
    return lambda folder: _compressed_tensors(folder, *schemes, ignored=ignored)


QUANTIZERS: Mapping[str, Quantize] = {
    **{name: partial(quantize_folder, case=case) for name, case in CASES.items()},
    "bnb-nf4": partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-nf4-double": partial(
        _bitsandbytes,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # Bytes are stored as numbers of this type, whose values mean nothing.
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"],
    ),
    "bnb-fp4": partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bnb-int8": partial(_bitsandbytes, load_in_8bit=True),
    "ct-int2": _ct(_grouped(2, 16)),
    "ct-int3-zeros": _ct(_grouped(3, 16, symmetric=False)),
    "ct-int4": _ct(_grouped(4, 16)),
    "ct-int4-zeros": _ct(_grouped(4, 16, symmetric=False)),
    "ct-int4-channel": _ct(_channels(4, symmetric=False)),
    "ct-int8-packed": _ct(_grouped(8, 16)),
    "ct-int8": _ct(_preset("W8A8")),
    "ct-fp8-tensor": _ct(_preset("FP8")),
    "ct-fp8-channel": _ct(_preset("FP8_DYNAMIC")),
    "ct-fp8-block": _ct(
        _scheme(num_bits=8, type="float", strategy="block", block_structure=[24, 24])
    ),
    "ct-mxfp4": _ct(_preset("MXFP4A16")),
    "ct-mxfp8": _ct(_preset("MXFP8A16")),
    "ct-nvfp4": _ct(_preset("NVFP4A16")),
    "ct-mixed": _ct(
        _grouped(8, 8, "re:.*v_proj$", symmetric=False),
        _grouped(4, 16, "re:.*(q|k|o)_proj$"),
        _grouped(3, 16, "re:.*mlp.*", symmetric=False),
        _grouped(4, 16, "lm_head", symmetric=False),
        ignored=["model.layers.0.mlp.down_proj"],
    ),
}
"""What makes each case: formulas, and programs.

The parts of `ct-mixed` that are computed together differ, and its output layer is quantised.
"""
ROUNDED_TWICE = {"bnb-int8": 2.0**-22}
"""Relative differences that are allowed: it multiplies by the two factors one after another."""
