"""What a folder of convert-checkpoint and one of build have in common: a model's files.

config.json is written last: a folder that was not finished is no model folder.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.tensor_file import encode_sizes, write_atomically
from loraplex.compat.convert.flag_tables import NEMO
from loraplex.core.errors import ConfigError
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.hub import resolve_model
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

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_COPIED = (
    *("generation_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.*"),
    *("additional_chat_templates/*.jinja", "preprocessor*.json"),
)
"""The tokenizer, the chat template and what ends a text."""


def find_model(path: str) -> Path:
    """The folder of a --model_dir. Raises ConfigError, by name for what NeMo wrote."""
    folder = Path(path).expanduser()
    if folder.suffix == ".nemo" or (folder.is_dir() and any(folder.glob("*.nemo"))):
        raise ConfigError(f"{path}: {NEMO}")
    return resolve_model(path)


def open_output(path: str, source: Path) -> Path:
    """The folder to write, without what an earlier run left. Raises ConfigError.

    A folder that holds another model is not touched.
    """
    folder = Path(path).expanduser()
    if folder.resolve() == source.resolve():
        raise ConfigError(f"--output_dir {path} is the folder that is read")
    config = folder / CONFIG_NAME
    if config.exists() and OUR_TABLE not in read_fields(config):
        raise ConfigError(f"--output_dir {path} holds another model: give a folder of its own")
    if not config.exists() and (folder / LORA_FOLDER).exists():
        raise ConfigError(f"--output_dir {path} has a folder {LORA_FOLDER} that no build wrote")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_NAME, HF_CONFIG_NAME, WEIGHTS_NAME, PACKED_NAME):
            (folder / name).unlink(missing_ok=True)
        if (folder / LORA_FOLDER).exists():
            shutil.rmtree(folder / LORA_FOLDER)
    except OSError as error:
        raise ConfigError(f"cannot write to --output_dir {path}: {error.strerror}") from error
    return folder


def write_hf_config(source: Path, folder: Path, dtype: str) -> None:
    """The model's own configuration, with the type of the weights as they are here."""
    values = dict(model_fields(source).values)
    values.pop("torch_dtype", None)
    write_json(folder / HF_CONFIG_NAME, values | {"dtype": dtype})


def copy_text_files(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation settings: as far as they are there."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def write_weights(source: Path, folder: Path, config: ModelSpec, dtype: str) -> None:
    """All weights as `dtype`, one tensor in memory at a time. Raises ConfigError."""
    shapes = checkpoint_shapes(config)
    item_bytes = TORCH_DTYPES[dtype].itemsize
    sizes = [
        (name, _FILE_DTYPES[dtype], shape, torch.Size(shape).numel() * item_bytes)
        for name, shape in shapes.items()
    ]
    path = folder / WEIGHTS_NAME
    try:
        with Checkpoint(source, config) as checkpoint:
            pieces = _pieces(checkpoint, list(shapes), TORCH_DTYPES[dtype])
            header = encode_sizes(sizes, {"format": "pt"})
            write_atomically(path, _with_header(header, pieces))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    try:
        write_atomically(path, [json.dumps(values, indent=4).encode() + b"\n"])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _with_header(
    header: bytes, pieces: Iterator[memoryview]
) -> Iterator[bytes | bytearray | memoryview]:
    yield header
    yield from pieces


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
