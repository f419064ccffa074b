"""Formats of checkpoints whose linear layers are quantised already. Free of torch.

The configuration names the format; which layers are quantised, and how, the tensors decide
(execution.weights.quantized).
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
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
    GGUF = "gguf"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFormat:
    method: StoredMethod
    fields: ConfigFields = dataclasses.field(compare=False)
    """The object that describes it."""

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
    **{method.value: method for method in StoredMethod},
    "fbgemm_fp8": StoredMethod.FP8,
}
_ALGORITHMS: Final = {
    "FP8": StoredMethod.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": StoredMethod.FP8,
    "FP8_PB_WO": StoredMethod.FP8,
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
    stored = StoredFormat(method or _method(table), table)
    _CHECKS.get(stored.method, _no_check)(table)
    return stored


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


def _require_one_of(table: ConfigFields, name: str, default: str, known: tuple[str, ...]) -> None:
    value = table.text(name, default).lower()
    if value not in known:
        raise UnsupportedModelError(
            f"{table.source}: {name} {value!r} is not supported; supported: {', '.join(known)}"
        )


def _no_check(table: ConfigFields) -> None:
    del table


def _check_gptq(table: ConfigFields) -> None:
    _require_one_of(table, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))


def _check_awq(table: ConfigFields) -> None:
    _require_one_of(table, "version", "gemm", ("gemm", "gemv"))


def _check_compressed_tensors(table: ConfigFields) -> None:
    for name in ("transform_config", "sparsity_config"):
        # The format "dense" means that nothing is sparse.
        nested = table.table(name)
        if nested is not None and nested.text("format", "") != "dense":
            raise UnsupportedModelError(f"{table.source}: {name} is not supported")


def _check_fp8(table: ConfigFields) -> None:
    _require_one_of(table, "weight_scale_semantics", "multiply", ("multiply",))


_CHECKS: Final = {
    StoredMethod.GPTQ: _check_gptq,
    StoredMethod.AWQ: _check_awq,
    StoredMethod.COMPRESSED_TENSORS: _check_compressed_tensors,
    StoredMethod.FP8: _check_fp8,
}
