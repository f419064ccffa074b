"""One model's texts and tokens, as its Triton models read and write them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from loraplex.serving.backend import Backend


@dataclasses.dataclass(frozen=True)
class ModelTexts:
    """The tokenizer of one base model. Any thread may call it."""

    backend: Backend
    model: str

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.backend.model(self.model).tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a whole text, or one that follows another: that keeps a space at its beginning.

        A whole text begins with the tokens that the tokenizer puts before every text; if it puts
        none there, everything counts as whole.
        """
        first = self._first_ids
        return self.backend.model(self.model).detokenize(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            is_continuation=bool(first) and list(token_ids[:1]) != first,
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    @functools.cached_property
    def _first_ids(self) -> list[int]:
        """The token that the tokenizer puts before every text, if it does."""
        return self.encode("", add_special_tokens=True)[:1]

    def token_texts(self) -> Callable[[int], str]:
        """Return a function from a token to its text: half a character becomes U+FFFD."""
        token_bytes = self.backend.model(self.model).token_bytes
        return lambda token_id: token_bytes(token_id).decode(errors="replace")
