"""Text to token ids and back for a program: by a folder's tokenizer, or by the server's own."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.tensors import inputs, row, texts
from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import Tokenizer, load_tokenizer

PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt, and the ids that go with it; NO_TOKEN where the tokenizer has none."""

    token_ids: list[int]
    end_id: int
    pad_id: int


class Codec(Protocol):
    def encode(self, text: str) -> Encoded: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class FolderCodec:
    """The tokenizer of a model folder, with the folder's own rules."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError."""
        self._tokenizer: Tokenizer = load_tokenizer(folder)

    def encode(self, text: str) -> Encoded:
        tokenizer = self._tokenizer
        end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        end_id = NO_TOKEN if end_id is None else end_id
        return Encoded(tokenizer.encode(text), end_id, end_id if pad_id is None else pad_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


class ServedCodec:
    """The tokenizer of the served model: its `preprocessing` and `postprocessing`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def encode(self, text: str) -> Encoded:
        tensors = {"QUERY": texts([text]), "REQUEST_OUTPUT_LEN": row([1], np.int32)}
        result = self._infer(PREPROCESSING, tensors)
        return Encoded(
            result.as_numpy("INPUT_ID")[0].tolist(),
            int(result.as_numpy("OUT_END_ID").flat[0]),
            int(result.as_numpy("OUT_PAD_ID").flat[0]),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        tensors = {
            "TOKENS_BATCH": row([list(token_ids)], np.int32),
            "SEQUENCE_LENGTH": row([len(token_ids)], np.int32),
        }
        output = self._infer(POSTPROCESSING, tensors).as_numpy("OUTPUT")
        return bytes(output.flat[0]).decode(errors="replace")

    def _infer(self, model: str, tensors: dict[str, Any]) -> Any:
        try:
            return self._client.infer(model, inputs(triton_grpc, tensors))
        except InferenceServerException as error:
            if not _is_unknown_model(error):
                raise
            raise ConfigError(
                f"the server has no model {model!r} to tokenize with; say --tokenizer-dir FOLDER"
            ) from error


def codec_of(folder: str, client: Any) -> Codec:
    """Of a folder, or without one of the server."""
    return FolderCodec(folder) if folder else ServedCodec(client)


def _is_unknown_model(error: InferenceServerException) -> bool:
    return "unknown model" in (error.message() or "").lower()
