"""Files that requests are made from: adapters, token ids, prompt tables and data sets.

The pair of an adapter is what TensorRT-LLM's hf_lora_convert.py and `loraplex compat convert-lora`
write. No file is unpickled.
"""

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from loraplex.compat.client.tensors import BFLOAT16_BITS, Array, bfloat16_bits
from loraplex.core.errors import ConfigError

Say = Callable[[str], None]
"""Prints one line."""

WEIGHTS_NAME = "model.lora_weights.npy"
CONFIG_NAMES = ("model.lora_config.npy", "model.lora_keys.npy")
MAX_FILE_BYTES = 2**31 - 2**20
"""A gRPC message has at most 2 GiB, and the rest of the request needs some of it."""
TOKENS_PER_WORD = 1.3
NO_OUTPUT_TOKENS = 100
"""Requested if the data set has no output to take the length from."""

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), BFLOAT16_BITS)


def read_lora_pair(folder: str) -> dict[str, Array]:
    """Return lora_weights [1, N, W] and lora_config [1, N, 3 or 4]. Raises ConfigError."""
    path = Path(folder)
    config_path = next((path / name for name in CONFIG_NAMES if (path / name).is_file()), None)
    if config_path is None or not (path / WEIGHTS_NAME).is_file():
        raise ConfigError(
            f"--lora-path: {path} must have {WEIGHTS_NAME} and {' or '.join(CONFIG_NAMES)}; "
            "loraplex compat convert-lora writes them from a PEFT folder"
        )
    weights, config = _read(path / WEIGHTS_NAME), _read(config_path)
    if weights.dtype not in _FLOATS:
        raise ConfigError(
            f"{path / WEIGHTS_NAME} holds {weights.dtype}; float16, float32 or bfloat16 is right"
        )
    if not np.issubdtype(config.dtype, np.integer):
        raise ConfigError(f"{config_path} holds {config.dtype}; int32 is right")
    return {"lora_weights": weights, "lora_config": config.astype(np.int32)}


def read_prompt_table(path: str, dtype: str) -> Array:
    """Return [1, rows, hidden] in float16, float32 or bfloat16. Raises ConfigError."""
    table = _read(Path(path))
    if table.dtype == BFLOAT16_BITS:
        if dtype != "bfloat16":
            raise ConfigError(f"{path} holds bfloat16: give --dtype bfloat16")
        return table
    if not np.issubdtype(table.dtype, np.floating):
        raise ConfigError(f"{path} holds {table.dtype}; numbers with a point are right")
    return bfloat16_bits(table) if dtype == "bfloat16" else table.astype(dtype)


def read_token_ids(path: str) -> list[int]:
    """Return the first row of a CSV file. Raises ConfigError."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            token_ids = [int(cell) for cell in next(iter(csv.reader(file)), [])]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a CSV file of token ids: {error}") from error
    if not token_ids:
        raise ConfigError(f"{path} has no token ids in its first row")
    return token_ids


def _read(path: Path) -> Array:
    """Read [1, rows, columns] from that or from [rows, columns]."""
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
    if array.ndim == 2:
        return array[None]
    if array.ndim != 3 or array.shape[0] != 1:
        raise ConfigError(f"{path} has the shape {list(array.shape)}; [1, rows, columns] is right")
    return array


class _DatasetRow(msgspec.Struct):
    input: str
    instruction: str = ""
    output: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    num_output_tokens: int
    """Approximate length of the data set's own output."""


def read_dataset(
    path: str, max_input_len: int | None, say: Say, tokens_per_word: float = TOKENS_PER_WORD
) -> list[Sample]:
    """Read a data set, without the prompts that are longer than max_input_len.

    The file is a JSON array of objects with the texts `input`, `instruction`, `output`. Raises
    ConfigError.
    """
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_DatasetRow])
    except OSError as error:
        raise ConfigError(f"--dataset: cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--dataset: {path} is not a JSON array of objects with the texts input, instruction "
            f"and output: {error}"
        ) from error
    samples = []
    num_without = 0
    for row in rows:
        prompt = f"{row.input} {row.instruction}"
        # The original divides where it should multiply; so the same prompts are skipped.
        if max_input_len is not None and int(len(prompt.split()) / tokens_per_word) > max_input_len:
            continue
        num_words = len(row.output.split())
        num_without += num_words == 0
        num_tokens = int(num_words * tokens_per_word) if num_words else NO_OUTPUT_TOKENS
        samples.append(Sample(prompt, max(num_tokens, 1)))
    if not samples:
        raise ConfigError(f"--dataset: {path} has no prompt that is short enough")
    if num_without:
        say(f"[INFO] {num_without} prompts have no output: each gets {NO_OUTPUT_TOKENS} tokens.")
    return samples
