"""Text to token ids and back for a program: by a folder's tokenizer, or by the server's own."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from tritonclient.utils import InferenceServerException

from loraplex.compat.client.tensors import Array, inputs, row, text_of, texts
from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import load_tokenizer

NO_TOKEN = -1


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

    def encode(self, text: str) -> Encoded:
        tokenizer = self._tokenizer
        end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        end_id = NO_TOKEN if end_id is None else end_id
        return Encoded(tokenizer.encode(text), end_id, end_id if pad_id is None else pad_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)


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


def postprocessing_tensors(token_ids: Sequence[int]) -> dict[str, Array]:
    return {"TOKENS_BATCH": row([list(token_ids)]), "SEQUENCE_LENGTH": row([len(token_ids)])}
