"""Conversion of adapter files, offline: without a server or torch.

Owns the files on disk: no file is overwritten without --force, and no reader ever finds a mixture
of old and new files. `adapters.formats` owns the formats.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from loraplex.adapters.canonical import CanonicalRow
from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.export import (
    common_storage_type,
    holding_module,
    lora_tensors,
    with_separate_halves,
)
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.inputs import FILE_SUFFIX, PeftFolder, open_input
from loraplex.adapters.formats.npy import encode_npy_header
from loraplex.adapters.formats.peft import WEIGHTS_NAME
from loraplex.adapters.formats.peft_config import CONFIG_NAME
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import StagingLimits, encode_header
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError, InvalidParameterError

_NO_BASE = BaseShapes(0, {})


@dataclasses.dataclass(frozen=True, slots=True)
class PeftAdapter:
    """Rows and warnings of a PEFT folder."""

    rows: tuple[CanonicalRow, ...]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A file that was written: its path, and what is in it."""

    path: Path
    content: str


def read_peft(folder: str, shapes: BaseShapes | None = None) -> PeftAdapter:
    """Read a PEFT folder. shapes: of the base, without which stacked tensors cannot be read.

    Raises InvalidAdapterError or UnsupportedFeatureError; tensors that cannot be converted are
    named.
    """
    limits = StagingLimits()
    source = open_input(folder, limits)
    if not isinstance(source, PeftFolder):
        raise InvalidAdapterError(
            f"{folder} is not a PEFT folder ({CONFIG_NAME} beside {WEIGHTS_NAME})"
        )
    try:
        rows = source.read_rows(shapes or _NO_BASE, limits)
    except AdapterMismatchError as error:
        if shapes is not None:
            raise
        raise InvalidAdapterError(
            f"{folder} has LoRA of all experts in one tensor, which is read by the base model's "
            "sizes: name its folder (--model-dir)"
        ) from error
    warnings = source.warnings(rows, shapes or _NO_BASE)
    return PeftAdapter(rows, tuple(warnings))


def write_pair(
    rows: Sequence[CanonicalRow],
    folder: Path,
    storage: StorageType,
    *,
    num_experts: int | None = None,
    force: bool = False,
) -> list[Written]:
    """Write TensorRT-LLM's folder: what hf_lora_convert.py writes. num_experts: see lora_tensors.

    Raises InvalidParameterError if a file would be overwritten and force is not set, else as
    lora_tensors.
    """
    weights_path, config_path = folder / trtllm.WEIGHTS_NAME, folder / trtllm.CONFIG_NAMES[0]
    old = [weights_path, *(folder / name for name in trtllm.CONFIG_NAMES)]
    _check_free(old, force)
    weights, config = lora_tensors(rows, storage, num_experts)
    # Without its config a pair is no pair: new weights never meet an old one.
    _remove(old[1:])
    for path, tensor in ((weights_path, weights), (config_path, config)):
        write_atomically(path, [encode_npy_header(tensor), tensor.data])
    return [
        Written(weights_path, f"{list(weights.shape)} {storage}"),
        Written(config_path, f"{list(config.shape)} int32"),
    ]


def write_lora_file(
    rows: Sequence[CanonicalRow],
    path: Path,
    storage: StorageType | None = None,
    *,
    num_experts: int | None = None,
    force: bool = False,
) -> list[Written]:
    """Write llgtrt's file: what extract_lora.py writes. No storage type keeps that of the rows.

    Raises as write_pair.
    """
    if path.suffix != FILE_SUFFIX:
        raise InvalidParameterError(f"{path} must end in {FILE_SUFFIX}: so llgtrt finds it")
    _check_free([path], force)
    chosen = storage or common_storage_type(rows)
    weights, config = lora_tensors(rows, chosen, num_experts)
    write_atomically(path, trtllm.encode_lora_file(weights, config))
    shapes = f"weights {list(weights.shape[1:])} {chosen}, config {list(config.shape[1:])} int32"
    return [Written(path, shapes)]


def write_peft(
    rows: Sequence[CanonicalRow],
    folder: Path,
    base_model: str | None = None,
    *,
    force: bool = False,
) -> list[Written]:
    """Write a PEFT folder. Raises as write_pair."""
    weights_path, config_path = folder / WEIGHTS_NAME, folder / CONFIG_NAME
    _check_free([weights_path, config_path], force)
    tensors, config = peft_tensors(rows), peft_config(rows, base_model)
    header = encode_header(tensors, {"format": "pt"})
    _remove([config_path])
    write_atomically(weights_path, [header, *(tensor.data for tensor in tensors.values())])
    write_atomically(config_path, [json.dumps(config, indent=2).encode()])
    return [
        Written(weights_path, f"{len(tensors)} tensors"),
        Written(config_path, f"rank {config['r']}, alpha {config['lora_alpha']}"),
    ]


def describe_rows(rows: Iterable[CanonicalRow]) -> list[str]:
    """Return lines with the TensorRT-LLM module of each module, equal layers together."""
    experts: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for row in with_separate_halves(rows):
        module = holding_module(row)
        stored_as = "no module" if module is None else f"{module.name} ({module.id})"
        sizes = f"rank {row.tensors['a'].shape[0]}, scale {row.scale:g}"
        of_layer = experts[f"{row.module} -> {stored_as}", sizes, row.layer or 0]
        of_layer += [] if row.expert is None else [row.expert]
    layers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for (name, sizes, layer), numbers in experts.items():
        layers[name, f"experts {_ranges(numbers)}, " if numbers else "", sizes].append(layer)
    return [
        f"{name}: layers {_ranges(found)}, {of_experts}{sizes}"
        for (name, of_experts, sizes), found in sorted(layers.items())
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Such as 0-3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _check_free(paths: Iterable[Path], force: bool) -> None:
    taken = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if taken and not force:
        raise InvalidParameterError(
            f"{', '.join(taken)} already there; --force overwrites", param="force"
        )


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
