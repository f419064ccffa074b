"""The tensors of a request to `tensorrt_llm`, from the flags that several programs have."""

from collections.abc import Mapping

import numpy as np

from loraplex.compat.client.codec import Codec, Encoded
from loraplex.compat.client.files import read_lora_pair, read_prompt_table, read_token_ids
from loraplex.compat.client.tensors import Array, flag_tensors, row
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError


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


def request_tensors(options: Flags, prompt: Encoded) -> Mapping[str, Array]:
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
