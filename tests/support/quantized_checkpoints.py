"""Weights as other programs store them quantised: made from random codes by each layout's formula.

Nothing here is shared with the code that reads them. Codes are laid into words as one long integer.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
NF4 = [
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
]
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
    num_words = -(-codes.shape[-1] * bits // 32)
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        number = sum(code << (bits * index) for index, code in enumerate(row))
        data = bytearray(number.to_bytes(4 * num_words, "little"))
        rows.append(torch.frombuffer(data, dtype=torch.int32))
    return torch.stack(rows).view(*codes.shape[:-1], num_words)


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
    num_groups = num_inputs // size
    codes, zeros = _codes(bits, num_outputs, num_inputs), _codes(bits, num_outputs, num_groups)
    if is_symmetric:
        zeros.fill_(1 << (bits - 1))
    scales = _scales(num_outputs, num_groups)
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


def _fp8_case(kind: str, **config: Any) -> Case:
    return Case({"quant_method": "fp8", **config}, lambda out, n: _fp8(out, n, kind))


def _ct_packed(
    num_outputs: int, num_inputs: int, *, bits: int, size: int, has_zeros: bool
) -> Encoded:
    num_groups = num_inputs // size
    codes = _codes(bits, num_outputs, num_inputs)
    zeros = _codes(bits, num_outputs, num_groups) if has_zeros else None
    scales = _scales(num_outputs, num_groups, dtype=torch.bfloat16)
    tensors = {
        ".weight_packed": words_of(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if zeros is None:
        zeros = torch.full((num_outputs, num_groups), 1 << (bits - 1))
    else:
        tensors[".weight_zero_point"] = words_of(zeros.t(), bits).t().contiguous()
    groups = torch.arange(num_inputs) // size
    return Encoded(tensors, _affine(codes, zeros, scales, groups))


def _ct_bytes(num_outputs: int, num_inputs: int) -> Encoded:
    codes = torch.randint(-128, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales = _scales(num_outputs, 1, dtype=torch.float32) / 8
    return Encoded({".weight": codes, ".weight_scale": scales}, codes.float() * scales)


def _ct_floats(num_outputs: int, num_inputs: int, *, size: int) -> Encoded:
    codes = _codes(4, num_outputs, num_inputs)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    numbers = torch.tensor(E2M1)[codes]
    if size == 32:
        exponents = torch.randint(118, 123, (num_outputs, num_inputs // 32), dtype=torch.uint8)
        wide = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, 1)
        return Encoded({".weight_packed": packed, ".weight_scale": exponents}, numbers * wide)
    scales = (1 + 3 * torch.rand(num_outputs, num_inputs // 16)).to(torch.float8_e4m3fn)
    divisor = torch.tensor([96.0])
    tensors = {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": divisor}
    wide = (scales.float() / divisor).repeat_interleave(16, 1)
    return Encoded(tensors, numbers * wide)


def _ct_case(form: str, encode: Callable[[int, int], Encoded], **weights: Any) -> Case:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return Case({**config, "config_groups": {"group_0": group}}, encode)


def _bnb_4(num_outputs: int, num_inputs: int, *, kind: str, is_double: bool) -> Encoded:
    size, num_values = 64, num_outputs * num_inputs
    codes = _codes(4, num_values)
    table = torch.tensor(NF4 if kind == "nf4" else E2M1) / (1 if kind == "nf4" else 6)
    num_blocks = -(-num_values // size)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16"}
    state["shape"] = [num_outputs, num_inputs]
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    tensors = {".weight": packed, ".weight.quant_map": table}
    if is_double:
        absmax = _codes(8, num_blocks).to(torch.uint8)
        nested, nested_map = 0.05 * torch.rand(-(-num_blocks // 256)), torch.rand(256)
        scales = nested_map[absmax.int()] * nested[torch.arange(num_blocks) // 256] + 0.125
        state |= {"nested_offset": 0.125, "nested_blocksize": 256}
        tensors[".weight.nested_absmax"], tensors[".weight.nested_quant_map"] = nested, nested_map
    else:
        scales = absmax = 0.05 + 0.1 * torch.rand(num_blocks)
    tensors[".weight.absmax"] = absmax
    data = bytearray(json.dumps(state).encode())
    name = f".weight.quant_state.bitsandbytes__{kind}"
    tensors[name] = torch.frombuffer(data, dtype=torch.uint8)
    decoded = table[codes] * scales.repeat_interleave(size)[:num_values]
    return Encoded(tensors, decoded.view(num_outputs, num_inputs))


def _bnb_8(num_outputs: int, num_inputs: int) -> Encoded:
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales = 0.3 + torch.rand(num_outputs)
    tensors = {".weight": codes, ".SCB": scales, ".weight_format": torch.tensor(0).byte()}
    return Encoded(tensors, codes.float() * (scales * 0.0078740157).unsqueeze(1))


def _bnb_case(kind: str, *, is_double: bool) -> Case:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Case(config, lambda out, n: _bnb_4(out, n, kind=kind, is_double=is_double))


def _ct_int(bits: int, size: int, *, has_zeros: bool) -> Case:
    return _ct_case(
        "pack-quantized",
        lambda out, n: _ct_packed(out, n, bits=bits, size=size, has_zeros=has_zeros),
        num_bits=bits,
        type="int",
        symmetric=not has_zeros,
        strategy="group",
    )


CASES: Mapping[str, Case] = {
    "fp8-tensor": _fp8_case("tensor"),
    "fp8-channel": _fp8_case("channel"),
    "fp8-block": _fp8_case("block", weight_block_size=[24, 24]),
    "mxfp8": _fp8_case("exponents"),
    "gptq-4": _gptq_case(4, 16),
    "gptq-4-order": _gptq_case(4, 16, is_ordered=False),
    "gptq-4-v2": _gptq_case(4, 16, "gptq_v2", zero_offset=0),
    "gptq-4-v2-undeclared": _gptq_case(4, 16, zero_offset=0, is_symmetric=True),
    "gptq-2": _gptq_case(2, 16),
    "gptq-3": _gptq_case(3, 16),
    "gptq-8": _gptq_case(8, 16, is_symmetric=True),
    "awq-gemm": _awq_case(is_gemm=True),
    "awq-gemv": _awq_case(is_gemm=False),
    "ct-int4": _ct_int(4, 16, has_zeros=False),
    "ct-int4-zeros": _ct_int(4, 16, has_zeros=True),
    "ct-int3": _ct_int(3, 16, has_zeros=True),
    "ct-int8-packed": _ct_int(8, 16, has_zeros=False),
    "ct-int8": _ct_case("int-quantized", _ct_bytes, num_bits=8, type="int", strategy="channel"),
    "ct-fp8": _ct_case(
        "float-quantized", lambda out, n: _fp8(out, n, "channel"), num_bits=8, type="float"
    ),
    "ct-mxfp4": _ct_case(
        "mxfp4-pack-quantized", lambda out, n: _ct_floats(out, n, size=32), num_bits=4
    ),
    "ct-nvfp4": _ct_case(
        "nvfp4-pack-quantized", lambda out, n: _ct_floats(out, n, size=16), num_bits=4
    ),
    "bnb-nf4": _bnb_case("nf4", is_double=False),
    "bnb-nf4-double": _bnb_case("nf4", is_double=True),
    "bnb-fp4": _bnb_case("fp4", is_double=False),
    "bnb-int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bnb_8),
}


def quantize_folder(folder: Path, case: Case, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Replace the linear layers of a saved model by random quantised ones; the rest stays.

    Returns all weights as they are decoded.
    """
    torch.manual_seed(seed)
    path = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
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
