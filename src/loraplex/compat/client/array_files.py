"""Array files that a request carries: an adapter's pair, token ids as CSV, a prompt table.

The pair is what TensorRT-LLM's hf_lora_convert.py and `loraplex convert-lora` write. Nothing is
unpickled.
"""

import csv
from pathlib import Path

import numpy as np

from loraplex.compat.client.tensors import BFLOAT16_BITS, Array, bfloat16_bits
from loraplex.core.errors import ConfigError

WEIGHTS_NAME = "model.lora_weights.npy"
CONFIG_NAMES = ("model.lora_config.npy", "model.lora_keys.npy")
MAX_FILE_BYTES = 2**31 - 2**20
"""A gRPC message has at most 2 GiB, and the request needs some of it."""

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), BFLOAT16_BITS)


def read_lora_pair(folder: str) -> tuple[Array, Array]:
    """(lora_weights [1, N, W], lora_config [1, N, 3 or 4]). Raises ConfigError."""
    path = Path(folder)
    config_path = next((path / name for name in CONFIG_NAMES if (path / name).is_file()), None)
    if config_path is None or not (path / WEIGHTS_NAME).is_file():
        raise ConfigError(
            f"--lora-path: {path} must have {WEIGHTS_NAME} and {' or '.join(CONFIG_NAMES)}; "
            "loraplex convert-lora writes them from a PEFT folder"
        )
    weights = _batched(_read(path / WEIGHTS_NAME), path / WEIGHTS_NAME)
    config = _batched(_read(config_path), config_path)
    if weights.dtype not in _FLOATS:
        raise ConfigError(
            f"{path / WEIGHTS_NAME} holds {weights.dtype}; float16, float32 or bfloat16 is right"
        )
    if not np.issubdtype(config.dtype, np.integer):
        raise ConfigError(f"{config_path} holds {config.dtype}; int32 is right")
    return weights, config.astype(np.int32)


def read_prompt_table(path: str, dtype: str) -> Array:
    """[1, rows, hidden] in float16, float32 or bfloat16. Raises ConfigError."""
    table = _read(Path(path))
    if table.dtype != BFLOAT16_BITS and not np.issubdtype(table.dtype, np.floating):
        raise ConfigError(f"{path} holds {table.dtype}; numbers with a point are right")
    table = _batched(table, Path(path))
    if dtype == "bfloat16":
        return table if table.dtype == BFLOAT16_BITS else bfloat16_bits(table)
    if table.dtype == BFLOAT16_BITS:
        raise ConfigError(f"{path} holds bfloat16: say --dtype bfloat16")
    return table.astype(dtype)


def read_token_ids(path: str) -> list[int]:
    """The first row of a CSV file. Raises ConfigError."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            first = next(iter(csv.reader(file)), [])
        token_ids = [int(cell) for cell in first]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a CSV file of token ids: {error}") from error
    if not token_ids:
        raise ConfigError(f"{path} has no token ids in its first row")
    return token_ids


def _read(path: Path) -> Array:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {size} bytes, and a request carries {MAX_FILE_BYTES} at most: let the "
                "server load the adapter from a folder"
            )
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} is not a NumPy array file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{path} is an archive of arrays; one array is right")
    return array


def _batched(array: Array, path: Path) -> Array:
    """[1, rows, columns] from that or from [rows, columns]."""
    if array.ndim == 3 and array.shape[0] == 1:
        return array
    if array.ndim == 2:
        return array[None]
    raise ConfigError(f"{path} has the shape {list(array.shape)}; [1, rows, columns] is right")
