"""Weights as other programs store them quantised: made from random codes by each layout's formula.

Nothing here is shared with the code that reads them. Codes are laid into words bit by bit.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output, of eight, in each nibble of a word."""


class Encoded(NamedTuple):
    tensors: Mapping[str, torch.Tensor]
    """Tensors by the ends of their names."""
    decoded: torch.Tensor
    """[out, in] float32"""


class Case(NamedTuple):
    config: Mapping[str, Any]
    """The object quantization_config."""
    encode: Callable[[int, int], Encoded]
    """Makes a random weight of so many outputs and inputs."""


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] -> [..., ceil(n bits / 32)] int32: codes one after another, from the lowest bit."""
    in_bits = (codes.unsqueeze(-1) >> torch.arange(bits)) & 1
    row_bits = in_bits.flatten(-2).to(torch.uint8).numpy()
    padding = [(0, 0)] * (row_bits.ndim - 1) + [(0, -row_bits.shape[-1] % 32)]
    packed = np.packbits(np.pad(row_bits, padding), axis=-1, bitorder="little")
    return torch.from_numpy(packed).view(torch.int32)


def _codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (0.005 + 0.02 * torch.rand(shape)).to(dtype)


def _affine(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """codes [out, in], zeros and scales [out, groups], groups [in]."""
    return (codes - zeros[:, groups]) * scales.float()[:, groups]


def _gptq(
    num_outputs: int,
    num_inputs: int,
    *,
    bits: int,
    size: int,
    zero_offset: int = 1,
    is_symmetric: bool = False,
    is_ordered: bool = True,
) -> Encoded:
    size = size if size > 0 else num_inputs
    num_groups = num_inputs // size
    codes, zeros = _codes(bits, num_outputs, num_inputs), _codes(bits, num_outputs, num_groups)
    if is_symmetric:
        zeros.fill_(1 << (bits - 1))
    scales = _scales(num_outputs, num_groups) / (1 << max(0, bits - 4))
    groups = torch.arange(num_inputs) // size
    if not is_ordered:
        groups = groups[torch.randperm(num_inputs)]
    stored_zeros = (zeros - zero_offset) % (1 << bits)
    tensors = {
        ".qweight": words_of(codes, bits).t().contiguous(),
        ".qzeros": words_of(stored_zeros.t(), bits).contiguous(),
        ".scales": scales.t().contiguous(),
        ".g_idx": groups.int(),
    }
    return Encoded(tensors, _affine(codes, zeros, scales, groups))


def _gptq_case(bits: int, size: int, form: str = "gptq", **options: Any) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    config |= {"checkpoint_format": form, "desc_act": not options.get("is_ordered", True)}
    config["sym"] = options.get("is_symmetric", False)
    return Case(config, lambda out, n: _gptq(out, n, bits=bits, size=size, **options))


def _awq(num_outputs: int, num_inputs: int, *, size: int, is_gemm: bool) -> Encoded:
    num_groups = num_inputs // size
    codes, zeros = _codes(4, num_outputs, num_inputs), _codes(4, num_outputs, num_groups)
    scales = _scales(num_outputs, num_groups)
    decoded = _affine(codes, zeros, scales, torch.arange(num_inputs) // size)
    if not is_gemm:
        # Zeros and scales are padded to whole words of the kernel.
        padded = torch.nn.functional.pad(zeros, (0, -num_groups % 16))
        wide = torch.nn.functional.pad(scales, (0, -num_groups % 16))
        words = words_of(codes, 4), words_of(padded, 4)
        return Encoded({".qweight": words[0], ".qzeros": words[1], ".scales": wide}, decoded)

    def shuffled(values: torch.Tensor) -> torch.Tensor:
        by_word = values.t().reshape(values.shape[1], -1, 8)
        return words_of(by_word[..., list(_AWQ_OUTPUTS)].flatten(1), 4)

    tensors = {".qweight": shuffled(codes), ".qzeros": shuffled(zeros)}
    return Encoded({**tensors, ".scales": scales.t().contiguous()}, decoded)


def _awq_case(*, is_gemm: bool) -> Case:
    version = "gemm" if is_gemm else "gemv"
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": version}
    return Case(
        config | {"zero_point": True}, lambda out, n: _awq(out, n, size=16, is_gemm=is_gemm)
    )


def _fp8(num_outputs: int, num_inputs: int, kind: str) -> Encoded:
    codes = torch.randn(num_outputs, num_inputs).mul_(40).to(torch.float8_e4m3fn)
    if kind == "block":
        scales = _scales(-(-num_outputs // 24), -(-num_inputs // 24), dtype=torch.float32)
        rows, columns = torch.arange(num_outputs) // 24, torch.arange(num_inputs) // 24
        decoded = codes.float() * scales[rows][:, columns]
        return Encoded({".weight": codes, ".weight_scale_inv": scales}, decoded)
    if kind == "exponents":
        exponents = torch.randint(118, 123, (num_outputs, num_inputs // 16), dtype=torch.uint8)
        wide = torch.pow(2.0, exponents.float() - 127).repeat_interleave(16, 1)
        return Encoded({".weight": codes, ".weight_scale": exponents}, codes.float() * wide)
    shape = {"tensor": (), "channel": (num_outputs, 1)}[kind]
    scales = _scales(*shape, dtype=torch.float32)
    tensors = {".weight": codes, ".weight_scale": scales, ".input_scale": torch.tensor(0.5)}
    return Encoded(tensors, codes.float() * scales)


def _modelopt_blocks(num_outputs: int, num_inputs: int) -> Encoded:
    codes = torch.randn(num_outputs, num_inputs).mul_(40).to(torch.float8_e4m3fn)
    scales = _scales(-(-num_outputs // 128), 1, -(-num_inputs // 128), 1, dtype=torch.float32)
    wide = scales[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    decoded = codes.float() * wide[:num_outputs, :num_inputs]
    return Encoded({".weight": codes, ".weight_scale": scales}, decoded)


def _modelopt_nvfp4(num_outputs: int, num_inputs: int) -> Encoded:
    codes = _codes(4, num_outputs, num_inputs)
    scales = (1 + 100 * torch.rand(num_outputs, num_inputs // 16)).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.0007)
    decoded = torch.tensor(E2M1)[codes] * (scales.float() * whole).repeat_interleave(16, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {".weight": packed, ".weight_scale": scales, ".weight_scale_2": whole}
    return Encoded({**tensors, ".input_scale": torch.tensor(0.5)}, decoded)


def _modelopt_case(algorithm: str, encode: Callable[[int, int], Encoded]) -> Case:
    return Case({"quant_method": "modelopt", "quant_algo": algorithm}, encode)


def _fp8_case(kind: str, **config: Any) -> Case:
    return Case({"quant_method": "fp8", **config}, lambda out, n: _fp8(out, n, kind))


def _ct_ordered(num_outputs: int, num_inputs: int, *, size: int) -> Encoded:
    """compressed-tensors with `weight_g_idx`, which the program left out in version 0.19."""
    num_groups = num_inputs // size
    codes = _codes(4, num_outputs, num_inputs)
    scales = _scales(num_outputs, num_groups, dtype=torch.bfloat16)
    groups = (torch.arange(num_inputs) // size)[torch.randperm(num_inputs)]
    tensors = {
        ".weight_packed": words_of(codes, 4),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([num_outputs, num_inputs]),
        ".weight_g_idx": groups.int(),
    }
    zeros = torch.full((num_outputs, num_groups), 8)
    return Encoded(tensors, _affine(codes, zeros, scales, groups))


CASES: Mapping[str, Case] = {
    "fp8-tensor": _fp8_case("tensor"),
    "fp8-channel": _fp8_case("channel"),
    "fp8-block": _fp8_case("block", weight_block_size=[24, 24]),
    "mxfp8": _fp8_case("exponents"),
    "modelopt-blocks": _modelopt_case("FP8_PB_WO", _modelopt_blocks),
    "modelopt-nvfp4": _modelopt_case("NVFP4", _modelopt_nvfp4),
    "gptq-4": _gptq_case(4, 16),
    "gptq-4-order": _gptq_case(4, 16, is_ordered=False),
    "gptq-4-v2": _gptq_case(4, 16, "gptq_v2", zero_offset=0),
    "gptq-4-v2-undeclared": _gptq_case(4, 16, zero_offset=0, is_symmetric=True),
    "gptq-4-rows": _gptq_case(4, -1),
    "gptq-2": _gptq_case(2, 16),
    "gptq-3": _gptq_case(3, 16),
    "gptq-8": _gptq_case(8, 16, is_symmetric=True),
    "awq-gemm": _awq_case(is_gemm=True),
    "awq-gemv": _awq_case(is_gemm=False),
    "ct-int4-order": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 16,
                        "actorder": "group",
                    },
                }
            },
            "ignore": ["lm_head"],
        },
        lambda out, n: _ct_ordered(out, n, size=16),
    ),
}


DELTA_WEIGHTS = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
"""Ends of the names of weights that published checkpoints of delta rules have quantised."""


def quantize_folder(
    folder: Path, case: Case, *, seed: int = 0, names: tuple[str, ...] = ("_proj.weight",)
) -> dict[str, torch.Tensor]:
    """Replace the linear layers of a saved model by random quantised ones; the rest stays.

    names: ends of the names of their weights. Returns all weights as they are decoded.
    """
    torch.default_generator.manual_seed(seed)
    path = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(names):
            stored[name] = decoded[name] = tensor
            continue
        encoded = case.encode(*tensor.shape)
        module = name.removesuffix(".weight")
        stored |= {module + end: part.contiguous() for end, part in encoded.tensors.items()}
        decoded[name] = encoded.decoded
    save_file(stored, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(case.config)
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


def encode_experts(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Replace the experts of a saved GPT-OSS by random MXFP4.

    Returns gate, up and down by the name of a layer's experts: [experts, out, in].
    """
    torch.default_generator.manual_seed(0)
    path, decoded = folder / "model.safetensors", {}
    stored = load_file(path)
    for name in [name for name in stored if name.endswith("experts.gate_up_proj")]:
        experts = name.removesuffix(".gate_up_proj")
        found = []
        for part in ("gate_up_proj", "down_proj"):
            num_experts, num_inputs, num_outputs = stored.pop(f"{experts}.{part}").shape
            codes = _codes(4, num_experts, num_outputs, num_inputs)
            exponents = torch.randint(118, 123, (num_experts, num_outputs, num_inputs // 32))
            packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            stored[f"{experts}.{part}_blocks"] = packed.view(*packed.shape[:-1], -1, 16)
            stored[f"{experts}.{part}_scales"] = exponents.to(torch.uint8)
            scales = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, -1)
            found.append(torch.tensor(E2M1)[codes] * scales)
        both, down = found
        decoded[experts] = both[:, ::2], both[:, 1::2], down
    save_file(stored, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return decoded
