"""What requests are made of: tensors, the files that they are read from, and prompts as token ids.

The pair of an adapter is what TensorRT-LLM's hf_lora_convert.py and `loraplex compat convert-lora`
write. No file is unpickled. Prompts become token ids by a folder's tokenizer or the server's own.
"""

import csv
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import load_tokenizer

Array = npt.NDArray[Any]

CACHE_AND_TIMES = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
)
"""Outputs that return_perf_metrics adds in every model that generates text."""

_OUTPUTS_OF_FLAGS = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
    "return_perf_metrics": CACHE_AND_TIMES,
}
"""Outputs that a flag adds, by the flag and its tensor."""

BFLOAT16_BITS = np.dtype("V2")
"""NumPy's type for elements of two bytes without a meaning: it has no bfloat16."""


def inputs(arrays: Mapping[str, Array]) -> list[Any]:
    """Return the arrays as tritonclient's inputs."""
    return [_input(name, array) for name, array in arrays.items()]


def row(values: Sequence[Any], dtype: Any = np.int32) -> Array:
    """Return [1, len(values)]: one element of a batch."""
    return np.array([values], dtype=dtype)


def texts(rows: Sequence[Sequence[str]]) -> Array:
    """Return BYTES of the shape [rows, words]."""
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for at, words in enumerate(rows):
        array[at, :] = [word.encode() for word in words]
    return array


def flag_tensors(options: Flags, num_rows: int = 1) -> dict[str, Array]:
    """Return the tensors of the flags that have one, equal for each row of the batch.

    A flag without a value (None, an empty list, a switch that is off) sends none.
    """
    tensors = {}
    for flag in options.rows:
        value = options.get(flag.key)
        if not flag.tensor or value is None or value is False or value in ((), []):
            continue
        dtype, _, name = flag.tensor.partition(" ")
        values = value if isinstance(value, list | tuple) else [value]
        rows = [values] * num_rows
        tensors[name or flag.key] = texts(rows) if dtype == "object" else np.array(rows, dtype)
    return tensors


def requested_names(options: Flags) -> list[str]:
    """Return the names of the outputs that the flags of a program add."""
    groups = [names for flag, names in _OUTPUTS_OF_FLAGS.items() if options.get(flag)]
    return [name for names in groups for name in names]


def requested_outputs(names: Sequence[str]) -> list[Any] | None:
    """Return tritonclient's objects for output names; None requests all outputs."""
    return [triton_grpc.InferRequestedOutput(name) for name in names] or None


def bfloat16_bits(values: Array) -> Array:
    """Round to bfloat16, to nearest with ties to even; infinities and NaN stay what they are."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return quiet.astype(np.uint16).view(BFLOAT16_BITS)


def decoded(output: Array) -> list[str]:
    """Return the elements of BYTES as texts."""
    return [bytes(text).decode(errors="replace") for text in output.flat]


def text_of(output: Array) -> str:
    """Return the first element of BYTES as text."""
    return decoded(output)[0]


def _input(name: str, array: Array) -> Any:
    # Versions of tritonclient disagree about the array type for BF16, so the tensor is made as
    # FP16, which has as many bytes, and renamed in its protobuf message.
    is_bfloat16 = array.dtype == BFLOAT16_BITS
    content = np.ascontiguousarray(array).view(np.float16) if is_bfloat16 else array
    tensor = triton_grpc.InferInput(name, content.shape, np_to_triton_dtype(content.dtype))
    tensor.set_data_from_numpy(content)
    if is_bfloat16:
        tensor._input.datatype = "BF16"
    return tensor


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


NO_TOKEN = -1
_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and its end and padding ids; NO_TOKEN if the tokenizer has none."""

    token_ids: list[int]
    end_id: int
    pad_id: int


class Codec(Protocol):
    def encode(self, text: str) -> Encoded: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class FolderCodec:
    """Tokenizer of a model folder, with the folder's own rules."""

    def __init__(self, folder: str) -> None:
        """Load it. Raises ConfigError."""
        self._tokenizer = load_tokenizer(folder)
        self.decode = self._tokenizer.decode

    def encode(self, text: str) -> Encoded:
        tokenizer = self._tokenizer
        end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        end_id = NO_TOKEN if end_id is None else end_id
        return Encoded(tokenizer.encode(text), end_id, end_id if pad_id is None else pad_id)


class ServedCodec:
    """Tokenizer of the served model: its `preprocessing` and `postprocessing`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def encode(self, text: str) -> Encoded:
        tensors = {"QUERY": texts([[text]]), "REQUEST_OUTPUT_LEN": row([1])}
        result = self._infer("preprocessing", tensors)
        return Encoded(
            result.as_numpy("INPUT_ID")[0].tolist(),
            int(result.as_numpy("OUT_END_ID").flat[0]),
            int(result.as_numpy("OUT_PAD_ID").flat[0]),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        tensors = postprocessing_tensors(token_ids)
        return text_of(self._infer("postprocessing", tensors).as_numpy("OUTPUT"))

    def _infer(self, model: str, tensors: dict[str, Any]) -> Any:
        try:
            return self._client.infer(model, inputs(tensors))
        except InferenceServerException as error:
            if "unknown model" not in (error.message() or "").lower():
                raise
            raise ConfigError(
                f"the server has no model {model!r} to tokenize with; give --tokenizer-dir FOLDER"
            ) from error


def prepared_tensors(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of preprocessing under their names in a request to `tensorrt_llm`."""
    return {ours: outputs[name] for name, ours in _FROM_PREPROCESSING.items()}


def postprocessing_tensors(token_ids: Sequence[int]) -> dict[str, Array]:
    return {"TOKENS_BATCH": row([list(token_ids)]), "SEQUENCE_LENGTH": row([len(token_ids)])}


def check_request(options: Flags) -> None:
    """Raise ConfigError for a flag that no request can have."""
    check_at_least("--request-output-len", options.request_output_len, 0)
    check_at_least("--beam-width", options.beam_width, 1)
    if options.draft_tokens_csv and not options.input_tokens_csv:
        raise ConfigError("--draft-tokens-csv needs --input-tokens-csv")


def prompt_of(options: Flags, codec: Codec | None) -> Encoded:
    """Return the prompt of the program; its text needs a codec. Raises ConfigError."""
    if options.input_tokens_csv or codec is None:
        token_ids = read_token_ids(options.input_tokens_csv)
        return Encoded(token_ids, options.end_id, options.pad_id)
    return codec.encode(options.text)


def prompt_tensors(prompt: Encoded) -> dict[str, Array]:
    """Return the tensors of the prompt alone."""
    return {
        "input_ids": row(prompt.token_ids),
        "input_lengths": row([len(prompt.token_ids)]),
        "end_id": row([prompt.end_id]),
        "pad_id": row([prompt.pad_id]),
    }


def request_tensors(options: Flags, prompt: Encoded) -> dict[str, Array]:
    """Return all tensors by name. Raises ConfigError for a file that cannot be sent."""
    tensors = {"streaming": row([bool(options.get("streaming"))], np.bool_)}
    tensors |= prompt_tensors(prompt) | flag_tensors(options)
    if options.lora_path:
        tensors |= read_lora_pair(options.lora_path)
    if options.draft_tokens_csv:
        tensors["draft_input_ids"] = row(read_token_ids(options.draft_tokens_csv))
    if options.prompt_embedding_table_path:
        table = read_prompt_table(options.prompt_embedding_table_path, options.dtype)
        tensors["prompt_embedding_table"] = table
        tensors["prompt_vocab_size"] = row([table.shape[1]])
    return tensors
