"""Texts of a base model in one process: its chat template, its tokenizer, and limits of prompts."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.core.errors import PromptTooLongError
from loraplex.serving.backend import ModelCard
from loraplex.serving.text.chat_renderer import ChatRenderer
from loraplex.serving.text.detokenizer import continuation
from loraplex.text.tokenizer import Tokenizer, prompt_token_ids

INLINE_CHARACTERS = 1024
"""Shorter texts are tokenized on the event loop: handing them to a thread would take longer."""
MAX_TOKEN_CHARACTERS = 256
"""Tokens are shorter: a prompt that has more for each that the model takes is too long, and is
not tokenized to count by how much."""
_USUAL_CHARACTERS = 8
"""A text with fewer characters for each token that the model takes is tokenized as a whole."""
_MAX_EXCESS = 2
"""A prompt with so many times more tokens than the model takes is not tokenized to its end."""
_MAX_CUT_EXCESS = 16
"""The same for a text that is only counted, or of which a part is used."""


@dataclasses.dataclass(slots=True, eq=False)
class LocalTexts:
    """Implementation of `serving.backend.TextModel`."""

    card: ModelCard
    tokenizer: Tokenizer
    chats: ChatRenderer

    async def prompt_ids(
        self, prompt: str | tuple[int, ...], add_special_tokens: bool, *, is_cut: bool = False
    ) -> list[int]:
        """The ids of a prompt; ids pass as they are. Raises PromptTooLongError.

        is_cut: the request takes a part of a prompt that is too long.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        max_excess = _MAX_CUT_EXCESS if is_cut else _MAX_EXCESS
        if len(prompt) <= INLINE_CHARACTERS:
            return self._encode(prompt, add_special_tokens, max_excess)
        return await asyncio.to_thread(self._encode, prompt, add_special_tokens, max_excess)

    def _encode(self, text: str, add_special_tokens: bool, max_excess: int) -> list[int]:
        """Return the tokens of a text. One of too many is refused before all of it is tokenized.

        The tokens of its parts can differ by a few from those of the whole: so the limit is far
        above what the model takes.
        """
        max_model_len = self.card.max_model_len
        if len(text) > max_model_len * MAX_TOKEN_CHARACTERS:
            raise self._too_long(f"{len(text)} characters")
        max_tokens, num_tokens = max_excess * max_model_len, 0
        part = max(max_model_len, INLINE_CHARACTERS)
        is_usual = len(text) <= max_model_len * _USUAL_CHARACTERS
        for start in () if is_usual else range(0, len(text), part):
            num_tokens += len(self.tokenizer.encode(text[start : start + part], False))
            if num_tokens > max_tokens:
                raise self._too_long(f"more than {max_tokens} tokens")
        return prompt_token_ids(self.tokenizer, text, add_special_tokens)

    def _too_long(self, size: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"the prompt has {size}; model {self.card.name!r} takes at most "
            f"{self.card.max_model_len} tokens (max_model_len), prompt and output together",
            param="prompt",
        )

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return await self.chats.render(messages, **options)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens, _MAX_CUT_EXCESS)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        if not is_continuation:
            return self.tokenizer.decode(token_ids, skip_special_tokens)
        return continuation(self.tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)
