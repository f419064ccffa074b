"""Blocks of GGUF's types, as codes, scales and offsets (llama.cpp's ggml-quants.c).

d and m are the float16 scale and minimum of a block. Blocks of 32 values: Q4_0 d (q - 8), Q4_1
d q + m, Q5_0 d (q - 16), Q5_1 d q + m, Q8_0 d q; in those of 4 and 5 bits byte j has value j in its
low half and value j + 16 in its high one. Blocks of 256 (K): d and m are multiplied by integers of
sub-blocks: Q4_K and Q5_K d sc q - m mn for 32 values, Q2_K likewise for 16, Q3_K d sc (q - 4) and
Q6_K d sc (q - 32) for 16; IQ4_XS d sc table[q] for 32.

Tensors have their Hugging Face names, and rows in the order of Hugging Face's.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType, read_gguf
from loraplex.core.gguf_names import HeadLayout, family_of, hugging_face_name
from loraplex.execution.weights.quantized.four_bit_floats import e2m1
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.execution.weights.read_ahead import ReadAhead
from loraplex.kernels.block_rows import BLOCK_TYPES, BlockRows, joined_rows
from loraplex.kernels.quantization import ScaleLevels
from loraplex.models.spec import LayerSpec, ModelSpec

_IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decoded_blocks(
    name: str, data: bytearray, kind: BlockType, shape: tuple[int, ...]
) -> torch.Tensor | StoredWeight:
    """Return a tensor of floats, or a quantised weight [..., out, in]. Raises ConfigError."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).view(shape)
    if len(shape) < 2:
        raise ConfigError(f"{name} of shape {list(shape)} is {kind.name}: only weights may be")
    blocks = raw.view(*shape[:-1], -1, kind.num_bytes)
    return _DECODERS[kind](blocks).checked(name)


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at a byte of each block, as float32: [..., blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _spread_bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the fields of `width` bits of bytes, the lowest first.

    [..., n] -> [..., 8 / width, n].
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(1)
    return packed.unsqueeze(-2) >> shifts & ((1 << width) - 1)


def _in_rows(packed: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] -> [..., n / size, size]."""
    return packed.reshape(*packed.shape[:-1], -1, size)


def _two_rows(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, then the high ones: [..., n] -> [..., 2 n]."""
    return _spread_bits(packed, 4).flatten(-2)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return bit j of the four bytes of each block for value j, as 16: [..., blocks, 32]."""
    return _spread_bits(blocks[..., start : start + 4], 1).transpose(-1, -2).flatten(-2) << 4


def _stored(
    codes: torch.Tensor,
    scales: torch.Tensor,
    size: int,
    bits: int,
    *,
    zeros: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> StoredWeight:
    """codes: [..., blocks, values]. Scales, and other parts, may have sub-blocks last."""
    return StoredWeight(
        codes=codes.flatten(-2),
        scales=scales,
        group_size=size,
        bits=bits,
        zeros=zeros,
        offsets=offsets,
        table=table,
        has_byte_inputs=True,
    )


def _super_blocks(
    codes: torch.Tensor, levels: ScaleLevels, size: int, bits: int, zero: int = 0
) -> StoredWeight:
    """codes: [..., blocks, 256]."""
    scales = levels.group_scales()
    return StoredWeight(
        codes=codes.flatten(-2),
        scales=scales,
        group_size=size,
        bits=bits,
        zeros=_constant(scales, zero) if zero else None,
        offsets=levels.group_offsets(),
        levels=levels,
    )


def _constant(scales: torch.Tensor, zero: int) -> torch.Tensor:
    return torch.full(scales.shape, zero, dtype=torch.uint8)


def _in_halves(blocks: torch.Tensor, bits: int, zero: int | None) -> StoredWeight:
    """Blocks of 4 or 5 bits; without a zero they have a minimum."""
    scales, first = _halves(blocks, 0), 4 if zero is None else 2
    codes = _two_rows(blocks[..., first + 4 * (bits - 4) :])
    if bits > 4:
        codes = codes | _fifth_bits(blocks, first)
    if zero is None:
        return _stored(codes, scales, 32, bits, offsets=-_halves(blocks, 2))
    return _stored(codes, scales, 32, bits, zeros=_constant(scales, zero))


def _q8_0(blocks: torch.Tensor) -> StoredWeight:
    return _stored(blocks[..., 2:].view(torch.int8), _halves(blocks, 0), 32, 8)


def _iq4_nl(blocks: torch.Tensor) -> StoredWeight:
    table = torch.tensor(_IQ4_NL, dtype=torch.float32)
    return _stored(_two_rows(blocks[..., 2:]), _halves(blocks, 0), 32, 4, table=table)


def _mxfp4(blocks: torch.Tensor) -> StoredWeight:
    scales = torch.exp2(blocks[..., 0].float() - 127)
    return _stored(_two_rows(blocks[..., 1:]), scales, 32, 4, table=e2m1())


def _iq4_xs(blocks: torch.Tensor) -> StoredWeight:
    # Scales of sub-blocks 2j and 2j + 1 have their low bits in the halves of byte j.
    low = _spread_bits(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _spread_bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = _halves(blocks, 0).unsqueeze(-1) * ((low | high << 4).float() - 32)
    codes = _two_rows(_in_rows(blocks[..., 8:], 16)).flatten(-2)
    table = torch.tensor(_IQ4_NL, dtype=torch.float32)
    return _stored(codes, scales.flatten(-2), 32, 4, table=table)


def _low_two_bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., 64] bytes -> [..., 256]: 32 bytes have 128 values, 32 in each two bits."""
    return _spread_bits(_in_rows(packed, 32), 2).flatten(-3)


def _q2_k(blocks: torch.Tensor) -> StoredWeight:
    both = blocks[..., :16]
    levels = ScaleLevels(
        _numbers(both & 15), _halves(blocks, 80), _numbers(both >> 4), _halves(blocks, 82)
    )
    return _super_blocks(_low_two_bits(blocks[..., 16:80]), levels, 16, 2)


def _q3_k(blocks: torch.Tensor) -> StoredWeight:
    # Bit j of byte k is the third bit of value k of the eighth j.
    third = _spread_bits(blocks[..., :32], 1).flatten(-2)
    codes = _low_two_bits(blocks[..., 32:96]) | third << 2
    low = _spread_bits(blocks[..., 96:104], 4).flatten(-2)
    high = _spread_bits(blocks[..., 104:108], 2).flatten(-2)
    factors = _numbers(low | high << 4) - 32
    return _super_blocks(codes, ScaleLevels(factors, _halves(blocks, 108)), 16, 3, zero=4)


def _numbers(fields: torch.Tensor) -> torch.Tensor:
    """[..., blocks, n] uint8 -> [..., blocks * n] int8."""
    return fields.to(torch.int8).flatten(-2)


def _scales_and_minima(blocks: torch.Tensor) -> ScaleLevels:
    """Return sc, d, mn and m of Q4_K and Q5_K.

    Twelve bytes hold eight pairs of 6 bits: the first four pairs in the low bits of bytes 0 to 3
    and 4 to 7, of the others the low halves in bytes 8 to 11 and the upper two bits above them.
    """
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=-1)
    return ScaleLevels(_numbers(scales), _halves(blocks, 0), _numbers(minima), _halves(blocks, 2))


def _k_codes(packed: torch.Tensor) -> torch.Tensor:
    """[..., 128] bytes -> [..., 8, 32]: 32 bytes have two sub-blocks, one in each half."""
    return _spread_bits(_in_rows(packed, 32), 4).flatten(-3, -2)


def _q4_k(blocks: torch.Tensor) -> StoredWeight:
    codes = _k_codes(blocks[..., 16:]).flatten(-2)
    return _super_blocks(codes, _scales_and_minima(blocks), 32, 4)


def _q5_k(blocks: torch.Tensor) -> StoredWeight:
    # Bit j of byte k adds 16 to value k of sub-block j.
    codes = _k_codes(blocks[..., 48:]) | _spread_bits(blocks[..., 16:48], 1) << 4
    return _super_blocks(codes.flatten(-2), _scales_and_minima(blocks), 32, 5)


def _q6_k(blocks: torch.Tensor) -> StoredWeight:
    nibbles = _spread_bits(_in_rows(blocks[..., :128], 64), 4).flatten(-2)
    codes = nibbles.flatten(-2) | _low_two_bits(blocks[..., 128:192]) << 4
    factors = blocks[..., 192:208].contiguous().view(torch.int8).flatten(-2)
    return _super_blocks(codes, ScaleLevels(factors, _halves(blocks, 208)), 16, 6, zero=32)


_FLOATS: Final = MappingProxyType(
    {
        BlockType.F32: torch.float32,
        BlockType.F16: torch.float16,
        BlockType.BF16: torch.bfloat16,
    }
)
_DECODERS: Final[Mapping[BlockType, Callable[[torch.Tensor], StoredWeight]]] = MappingProxyType(
    {
        BlockType.Q4_0: functools.partial(_in_halves, bits=4, zero=8),
        BlockType.Q4_1: functools.partial(_in_halves, bits=4, zero=None),
        BlockType.Q5_0: functools.partial(_in_halves, bits=5, zero=16),
        BlockType.Q5_1: functools.partial(_in_halves, bits=5, zero=None),
        BlockType.Q8_0: _q8_0,
        BlockType.Q2_K: _q2_k,
        BlockType.Q3_K: _q3_k,
        BlockType.Q4_K: _q4_k,
        BlockType.Q5_K: _q5_k,
        BlockType.Q6_K: _q6_k,
        BlockType.IQ4_NL: _iq4_nl,
        BlockType.IQ4_XS: _iq4_xs,
        BlockType.MXFP4: _mxfp4,
    }
)


class GgufWeights:
    """Implements `TensorFile`."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, UnsupportedModelError."""
        self.path = path
        self._file = read_gguf(path)
        self._family = family_of(self._file)
        self._layouts = {
            f"model.layers.{index}.": _layout(layer) for index, layer in enumerate(spec.layers)
        }
        self._tensors = {
            name: tensor
            for tensor in self._file.tensors
            if (name := hugging_face_name(self._file, tensor)) is not None
        }
        self._joined = self._wholes()
        parts = {part for parts in self._joined.values() for part in parts}
        self.names: Sequence[str] = [*self._joined, *(n for n in self._tensors if n not in parts)]
        self._mappings: dict[Path, torch.Tensor] = {}
        self._reading: dict[Path, ReadAhead] = {}

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for reading in self._reading.values():
            reading.close()
        self._reading.clear()
        self._mappings.clear()

    def tensor(self, name: str) -> Any:
        """Return a tensor; a quantised weight as float32."""
        stored = self._read(name)
        tensor = stored.decoded() if isinstance(stored, StoredWeight) else stored
        if name.endswith("A_log"):
            return torch.log(-tensor.float()).flatten()
        if name.endswith(".D"):
            return tensor.flatten()
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            return tensor.unsqueeze(1)
        shift = self._family.norm_shift(name)
        is_norm = name.endswith(("norm.weight", "norm_f.weight"))
        return tensor.float().flatten() + shift if is_norm else tensor

    def stored(self, name: str) -> StoredWeight | None:
        """Return a quantised weight, but for the order of its rows as it is; None for others."""
        found = self._read(name)
        return found if isinstance(found, StoredWeight) else None

    def blocks(self, name: str) -> BlockRows | None:
        """Return the rows of a weight where they lie; None: of a type that no kernel reads so."""
        if name in self._joined:
            parts = [self.blocks(part) for part in self._joined[name]]
            if None in parts:
                return None
            whole = joined_rows([part for part in parts if part])
            order = self._heads(name).in_parts(name)
            return whole if order is None else whole.rows(lambda tensor: tensor[order])
        described = self._file.tensors[self._tensors[name]]
        if described.kind not in BLOCK_TYPES.values() or len(described.shape) < 2:
            return None
        data = self._mapped(described.path)[described.start :][: described.num_bytes]
        self._reading[described.path].want(described.start + described.num_bytes)
        if data.numel() < described.num_bytes:
            return None  # the file became shorter: `_read` has the message
        if self._family.file_columns(name, self._heads(name)) is not None:
            return None
        found = BlockRows.of(data, described.kind, described.shape)
        rows = self._rows(name, described.shape[0])
        return found if rows is None else found.rows(lambda tensor: tensor[rows])

    def _mapped(self, path: Path) -> torch.Tensor:
        """Return all bytes of a file, which are read when they are looked at or a little before."""
        if path not in self._mappings:
            self._reading[path] = ReadAhead(path)
            self._mappings[path] = torch.from_file(
                str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
            )
        return self._mappings[path]

    def _wholes(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the parts of each weight that the file has in parts."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self._tensors:
            for whole, (first, *others) in self._family.joined.items():
                layer, end, kind = name.partition(f"{first}.")
                if end:
                    parts = (first, *others)
                    found[f"{layer}{whole}.{kind}"] = tuple(f"{layer}{p}.{kind}" for p in parts)
        return found

    def _heads(self, name: str) -> HeadLayout:
        """Return the layout of a tensor's layer."""
        return next(
            (heads for layer, heads in self._layouts.items() if name.startswith(layer)),
            HeadLayout(),
        )

    def _rows(self, name: str, num_rows: int) -> list[int] | None:
        """Return the file's row for each row of a tensor; None: they are in order."""
        return self._family.file_rows(name, num_rows, self._heads(name))

    def _read(self, name: str) -> torch.Tensor | StoredWeight:
        if name in self._joined:
            whole = _joined_weight([self._read(part) for part in self._joined[name]])
            return _in_order(whole, self._heads(name).in_parts(name))
        own = self._tensors[name]
        described = self._file.tensors[own]
        found = decoded_blocks(
            f"{described.path}: {own}", self._file.bytes_of(own), described.kind, described.shape
        )
        rows = self._rows(name, described.shape[0])
        columns = self._family.file_columns(name, self._heads(name))
        found = _in_order(found, rows)
        if columns is None:
            return found
        if isinstance(found, StoredWeight):
            return found.reordered(torch.tensor(columns))
        return found[..., columns]


def _in_order(
    found: torch.Tensor | StoredWeight, rows: list[int] | None
) -> torch.Tensor | StoredWeight:
    """Return the rows of a tensor in an order; None: in its own."""
    if rows is None:
        return found
    if isinstance(found, StoredWeight):
        return found.rows(lambda tensor: tensor[rows])
    return found[rows]


def _joined_weight(parts: Sequence[torch.Tensor | StoredWeight]) -> torch.Tensor | StoredWeight:
    """Return one weight of the rows of several. Those of different types become floats."""
    stored = [part for part in parts if isinstance(part, StoredWeight)]
    if len(stored) == len(parts) and len({(p.bits, p.group_size) for p in stored}) == 1:
        found = stored[0].followed_by(stored[1:])
        if found is not None:
            return found
    return torch.cat([p.decoded() if isinstance(p, StoredWeight) else p.float() for p in parts])


def _layout(layer: LayerSpec) -> HeadLayout:
    groups = [group.whole for group in layer.linears.values()]
    layout = HeadLayout.of(
        {module: size for group in groups for module, size in group.outputs.items()},
        max((group.head_dim or 1 for group in groups), default=1),
        max((group.num_key_heads for group in groups), default=0),
    )
    return layout._replace(
        by_head={
            module: (group.num_split_heads, tuple(group.head_parts.values()))
            for group in groups
            if group.head_parts
            for module in group.outputs
        }
    )
