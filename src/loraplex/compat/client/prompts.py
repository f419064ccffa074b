"""Prompts as token ids, by a folder's tokenizer or the server's own, and their request tensors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.files import read_lora_pair, read_prompt_table, read_token_ids
from loraplex.compat.client.tensors import Array, flag_tensors, inputs, row, text_of, texts
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import load_tokenizer

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
