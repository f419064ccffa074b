"""Formats of checkpoints whose linear layers are quantised already. Free of torch.

The configuration names the format; which layers are quantised, and how, the tensors decide
(execution.weights.quantized).
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.models.config_fields import ConfigFields, read_fields

_CONFIG: Final = "quantization_config"


class StoredMethod(enum.StrEnum):
    """Values of `quant_method` that are read, one for each layout of tensors."""

    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"
    BITSANDBYTES = "bitsandbytes"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    GGUF = "gguf"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFormat:
    method: StoredMethod
    fields: ConfigFields = dataclasses.field(compare=False)
    """The object that describes it."""

    bits: float | None = None
    """Bits of a weight in memory where kernels multiply it as it is stored, with its scales and
    offsets in float32; None: it is widened. About: some layers may be widened all the same."""
    has_rounded_table: bool = False
    """Whether kernels round its table: in float32 it is widened instead."""
    has_experts_alone: bool = False
    """Whether only weights of experts are quantised."""

    def bits_in(self, dtype: str) -> float | None:
        """Return `bits` for a model of this dtype."""
        return None if self.has_rounded_table and dtype == "float32" else self.bits

    @property
    def values(self) -> Mapping[str, Any]:
        """Fields that decide how tensors are read, for the key of packed weights."""
        return self.fields.values_and_nulls


def refuse_second_quantization(stored: StoredFormat | None, precision: WeightPrecision) -> None:
    """Raise ConfigError if weights that are stored quantised are to be quantised once more."""
    if stored is not None and precision is not WeightPrecision.NATIVE:
        raise ConfigError(
            f"quantization {precision}: the weights are quantised already ({stored.method}, by "
            f"{stored.fields.source}), and are not quantised once more: leave it at none",
            param="quantization",
        )


_METHODS: Final = {
    **{method.value: method for method in StoredMethod if method is not StoredMethod.NVFP4},
    "fbgemm_fp8": StoredMethod.FP8,
}
_ALGORITHMS: Final = {
    "FP8": StoredMethod.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": StoredMethod.FP8,
    "FP8_PB_WO": StoredMethod.FP8,
    "MXFP8": StoredMethod.FP8,
    "NVFP4": StoredMethod.NVFP4,
}
"""Values of `quant_algo`, which NVIDIA's ModelOpt writes."""
_PACKINGS: Final = {
    "auto_round:auto_gptq": StoredMethod.GPTQ,
    "auto_round:auto_awq": StoredMethod.AWQ,
}
"""Values of `packing_format`, which AutoRound writes."""
_OLD_FILES: Final = {
    "quantize_config.json": StoredMethod.GPTQ,
    "quant_config.json": StoredMethod.AWQ,
}
"""Files in which early programs described the format, instead of config.json."""
_MODELOPT_FILE: Final = "hf_quant_config.json"


def read_stored_format(folder: Path, fields: ConfigFields) -> StoredFormat | None:
    """Read the format of a model folder; None: its weights are not quantised.

    fields: of its config.json. Raises ConfigError, UnsupportedModelError for a format that is not
    read.
    """
    found = next(_described(folder, fields), None)
    if found is None:
        return None
    table, method = found
    method = method or _method(table)
    _check(method, table)
    return StoredFormat(
        method,
        table,
        bits=_BITS_IN_MEMORY[method](table),
        has_rounded_table=table.text("bnb_4bit_quant_type", "") == "nf4",
        has_experts_alone=method is StoredMethod.MXFP4,
    )


def _described(
    folder: Path, fields: ConfigFields
) -> Iterator[tuple[ConfigFields, StoredMethod | None]]:
    """Yield the objects that describe a format, with the method that a file's name implies."""
    for config in (fields, fields.table("text_config")):
        table = None if config is None else config.table(_CONFIG)
        if table is not None:
            yield table, None
    if (folder / _MODELOPT_FILE).is_file():
        table = read_fields(folder / _MODELOPT_FILE).table("quantization")
        if table is not None and table.text("quant_algo", ""):
            yield table, _algorithm(table)
    for name, method in _OLD_FILES.items():
        if (folder / name).is_file():
            yield read_fields(folder / name), method


def _method(table: ConfigFields) -> StoredMethod:
    name = table.text("quant_method", "")
    if name == "modelopt":
        return _algorithm(table)
    if name == "auto-round":
        return _one_of(_PACKINGS, "packing_format", table)
    return _one_of(_METHODS, "quant_method", table)


def _algorithm(table: ConfigFields) -> StoredMethod:
    return _one_of(_ALGORITHMS, "quant_algo", table)


def _one_of(known: Mapping[str, StoredMethod], name: str, table: ConfigFields) -> StoredMethod:
    value = table.text(name, "")
    if value not in known:
        raise UnsupportedModelError(
            f"{table.source}: {name} {value!r} is not supported; supported: {', '.join(known)}"
        )
    return known[value]


_VARIANTS: Final = {
    StoredMethod.GPTQ: ("checkpoint_format", "gptq", "gptq_v2"),
    StoredMethod.AWQ: ("version", "gemm", "gemv"),
    StoredMethod.FP8: ("weight_scale_semantics", "multiply"),
}
"""Field that names a variant of a format, and the values that are read; the first is the default.
"""


def _check(method: StoredMethod, table: ConfigFields) -> None:
    """Raise UnsupportedModelError for a variant of a format that is not read."""
    if method in _VARIANTS:
        name, *known = _VARIANTS[method]
        value = table.text(name, known[0]).lower()
        if value not in known:
            raise UnsupportedModelError(
                f"{table.source}: {name} {value!r} is not supported; supported: {', '.join(known)}"
            )
    if method is StoredMethod.GPTQ and table.boolean("is_marlin_format", default=False):
        raise UnsupportedModelError(
            f"{table.source}: is_marlin_format is not supported; supported: checkpoints whose "
            "checkpoint_format is gptq or gptq_v2"
        )
    if method is StoredMethod.COMPRESSED_TENSORS:
        for name in ("transform_config", "sparsity_config"):
            # The format "dense" means that nothing is sparse.
            nested = table.table(name)
            if nested is not None and nested.text("format", "") != "dense":
                raise UnsupportedModelError(f"{table.source}: {name} is not supported")


_SCALE_BITS: Final = 32
_LONGEST_GROUP: Final = 512
"""Inputs that share a scale in memory where a whole row does in the file."""
_LONGEST_GROUP_OF_TABLES: Final = 64


def _bits_in_memory(bits: int, group_size: int | None, *, has_offsets: bool) -> float:
    """Return the bits of a weight, with its share of scales; 4 or 8, as kernels have them."""
    size = group_size if group_size is not None and group_size > 0 else _LONGEST_GROUP
    num_scales = 2 if has_offsets else 1
    return (4 if bits <= 4 else 8) + num_scales * _SCALE_BITS / min(size, _LONGEST_GROUP)


def _gptq_bits(table: ConfigFields) -> float | None:
    if table.boolean("desc_act", default=False):
        return None
    is_symmetric = table.boolean("sym", default=False)
    group_size = table.optional_integer("group_size")  # -1: a whole row
    return _bits_in_memory(table.integer("bits", 4), group_size, has_offsets=not is_symmetric)


def _awq_bits(table: ConfigFields) -> float:
    size = table.optional_integer("group_size")  # -1: a whole row
    group_size = size or table.optional_integer("q_group_size") or 128
    return _bits_in_memory(4, group_size, has_offsets=table.boolean("zero_point", default=True))


def _bitsandbytes_bits(table: ConfigFields) -> float:
    if table.boolean("load_in_8bit", default=False):
        return _bits_in_memory(8, None, has_offsets=False)
    return _bits_in_memory(4, _LONGEST_GROUP_OF_TABLES, has_offsets=False)


def _compressed_tensors_bits(table: ConfigFields) -> float | None:
    """Return the largest of all groups of layers."""
    groups = table.table("config_groups")
    tables = [] if groups is None else [groups.table(name) for name in groups.tables()]
    found = [
        _compressed_tensors_group_bits(weights)
        for weights in (group.table("weights") for group in tables if group is not None)
        if weights is not None
    ]
    known = [bits for bits in found if bits is not None]
    return max(known) if known and len(known) == len(found) else None


def _compressed_tensors_group_bits(weights: ConfigFields) -> float | None:
    bits = weights.integer("num_bits", 8)
    is_float = weights.text("type", "int") == "float"
    if (is_float and bits > 4) or weights.text("actorder", "") == "group":
        return None
    has_offsets = not weights.boolean("symmetric", default=True)
    return _bits_in_memory(bits, weights.optional_integer("group_size"), has_offsets=has_offsets)


_BITS_IN_MEMORY: Final[Mapping[StoredMethod, Callable[[ConfigFields], float | None]]] = {
    StoredMethod.FP8: lambda _: None,
    StoredMethod.COMPRESSED_TENSORS: _compressed_tensors_bits,
    StoredMethod.GPTQ: _gptq_bits,
    StoredMethod.AWQ: _awq_bits,
    StoredMethod.BITSANDBYTES: _bitsandbytes_bits,
    StoredMethod.MXFP4: lambda _: _bits_in_memory(4, 32, has_offsets=False),
    StoredMethod.NVFP4: lambda _: _bits_in_memory(4, 16, has_offsets=False),
    # What models.gguf_config added up over the tensors of the file.
    StoredMethod.GGUF: lambda table: table.optional_number("bits_in_memory"),
}
