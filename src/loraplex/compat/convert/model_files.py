"""What a folder of convert-checkpoint and one of build have in common: a model's files.

config.json is written last: a folder that was not finished is no model folder.
"""

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.tensor_file import encode_sizes
from loraplex.compat.convert.flag_tables import NEMO
from loraplex.core.errors import ConfigError
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.hub import resolve_model
from loraplex.execution.weights.weight_files import text_files
from loraplex.models.config_fields import read_fields
from loraplex.models.engine_folder import (
    CONFIG_NAME,
    HF_CONFIG_NAME,
    LORA_FOLDER,
    OUR_TABLE,
    PACKED_NAME,
    WEIGHTS_NAME,
    model_fields,
)
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.spec import ModelSpec

_FILE_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the type of one of flag_tables.DTYPES."""
    return {str(dtype).removeprefix("torch."): dtype for dtype in _FILE_DTYPES}[name]


def find_model(path: str) -> Path:
    """Return the folder of a --model_dir. Raises ConfigError, by name for what NeMo wrote."""
    folder = Path(path).expanduser()
    if folder.suffix == ".nemo" or (folder.is_dir() and any(folder.glob("*.nemo"))):
        raise ConfigError(f"{path}: {NEMO}")
    return resolve_model(path)


def write_model(
    source: Path, output: str, config: ModelSpec, dtype: str, *, has_weights: bool = True
) -> Path:
    """Write all files but config.json, the weights as `dtype`, and return the folder.

    Nothing of an earlier run is left in it. Raises ConfigError, also for a folder that holds
    another model, which is not touched.
    """
    folder = _open_output(output, source)
    if has_weights:
        _write_weights(source, folder / WEIGHTS_NAME, config, torch_dtype(dtype))
    for file in text_files(source):
        copy_file(file, folder / file.relative_to(source))
    values = dict(model_fields(source).values_and_nulls)
    values.pop("torch_dtype", None)
    write_json(folder / HF_CONFIG_NAME, values | {"dtype": dtype})
    return folder


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, into a new folder if need be. Raises ConfigError."""
    with _errors(f"copy {source} to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file. Raises ConfigError."""
    with _errors(f"write {path}"):
        write_atomically(path, [json.dumps(values, indent=4).encode() + b"\n"])


def _open_output(path: str, source: Path) -> Path:
    folder = Path(path).expanduser()
    if folder.resolve() == source.resolve():
        raise ConfigError(f"--output_dir {path} is the folder that is read")
    config = folder / CONFIG_NAME
    if config.exists() and OUR_TABLE not in read_fields(config):
        raise ConfigError(f"--output_dir {path} holds another model: give a folder of its own")
    if not config.exists() and (folder / LORA_FOLDER).exists():
        raise ConfigError(f"--output_dir {path} has a folder {LORA_FOLDER} that no build wrote")
    with _errors(f"write to --output_dir {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_NAME, HF_CONFIG_NAME, WEIGHTS_NAME, PACKED_NAME):
            (folder / name).unlink(missing_ok=True)
        if (folder / LORA_FOLDER).exists():
            shutil.rmtree(folder / LORA_FOLDER)
    return folder


def _write_weights(source: Path, path: Path, config: ModelSpec, dtype: torch.dtype) -> None:
    """Write all weights, one tensor in memory at a time."""
    shapes = checkpoint_shapes(config)
    sizes = [
        (name, _FILE_DTYPES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize)
        for name, shape in shapes.items()
    ]
    with _errors(f"write {path}"), Checkpoint(source, config) as checkpoint:
        pieces = _pieces(checkpoint, list(shapes), dtype)
        header = encode_sizes(sizes, {"format": "pt"})
        write_atomically(path, itertools.chain([header], pieces))


def _pieces(checkpoint: Checkpoint, names: list[str], dtype: torch.dtype) -> Iterator[memoryview]:
    for name in names:
        tensor = checkpoint.read(name)
        cast = tensor.to(dtype)
        if dtype is torch.float16 and not bool(torch.isfinite(cast).all()):
            largest = tensor.abs().max().item()
            raise ConfigError(
                f"{name} has {largest:g}, which float16 cannot hold: use --dtype bfloat16"
            )
        yield cast.contiguous().flatten().view(torch.uint8).numpy().data


@contextlib.contextmanager
def _errors(action: str) -> Iterator[None]:
    """Raise errors of the file system as ConfigErrors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot {action}: {error.strerror}") from error
