"""Texts of a base model in one process: its chat template, its tokenizer, and limits of prompts.

Chats are rendered in a sandbox process, so that no template and no chat can stop the event loop.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.errors import InvalidRequestError, PromptTooLongError
from loraplex.core.request import GenerateRequest
from loraplex.core.task import Pool
from loraplex.core.vector_format import TextPrompts
from loraplex.serving.backend import ModelCard
from loraplex.serving.sandbox.process import Sandbox, SandboxKind
from loraplex.serving.text.chat_template import NO_TEMPLATE, TOO_BIG, ChatTemplate
from loraplex.serving.text.detokenizer import continuation
from loraplex.text.tokenizer import PairTokens, Tokenizer

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


MAX_SECONDS: Final = 2.0
"""Processor time for one chat: the longest ones that fit a body take about half of it."""
CHATS: Final = SandboxKind(
    module="loraplex.serving.text.chat_worker",
    work="chats",
    max_seconds=MAX_SECONDS,
    max_bytes=1 << 30,
    error=InvalidRequestError,
    param="messages",
    too_slow=f"the chat template takes more than {MAX_SECONDS:g} s for these messages",
    too_big=TOO_BIG,
)

_INLINE_MESSAGES: Final = 32
"""Shorter chats are written as JSON on the event loop: a thread would take longer."""


class ChatRenderer:
    """Renderer of one model's chats. Those of a tenant wait for each other; no others do."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        source: str = "the chat template",
        json_indent: int | None = None,
        kind: SandboxKind = CHATS,
    ) -> None:
        """Take the arguments of `ChatTemplate`.

        Raises ConfigError if a template is not valid Jinja, or needs what is not supported.
        """
        arguments: dict[str, Any] = {
            "templates": dict(templates),
            "special_tokens": dict(special_tokens or {}),
            "source": source,
            "json_indent": json_indent,
        }
        self.text: Final = ChatTemplate(**arguments).text
        """Sources of all templates."""
        self.has_templates: Final = bool(templates)
        self._sandbox = Sandbox(kind, json.dumps(arguments).encode)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the prompt, as `ChatTemplate.render` makes it of JSON values.

        Raises InvalidRequestError also for a chat that exceeds the limits of time or memory, and
        QueueFullError if too many chats wait.
        """
        if not self.has_templates:
            raise InvalidRequestError(NO_TEMPLATE, param="messages")
        chat = functools.partial(_as_json, {"messages": messages, **options})
        is_short = len(messages) <= _INLINE_MESSAGES
        text = await self._sandbox.run(chat() if is_short else await asyncio.to_thread(chat))
        return text.decode(errors="surrogatepass")

    def close(self) -> None:
        """End the processes; chats that are being rendered fail."""
        self._sandbox.close()


def _as_json(chat: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(chat, ensure_ascii=False, default=dict)
    except RecursionError:
        raise InvalidRequestError(
            "the chat has values that are nested too deep", param="messages"
        ) from None
    return text.encode(errors="surrogatepass")


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
        above what the model takes. With add_special_tokens the tokens that the folder's tokenizer
        puts around a text are added, but never a second BOS: a text that begins with it (a chat
        template or the client wrote it) gets no other.
        """
        longest = self.card.longest_prompt
        if len(text) > longest * MAX_TOKEN_CHARACTERS:
            raise self._too_long(f"{len(text)} characters")
        max_tokens, num_tokens = max_excess * longest, 0
        part = max(longest, INLINE_CHARACTERS)
        is_usual = len(text) <= longest * _USUAL_CHARACTERS
        for start in () if is_usual else range(0, len(text), part):
            num_tokens += len(self.tokenizer.encode(text[start : start + part], False))
            if num_tokens > max_tokens:
                raise self._too_long(f"more than {max_tokens} tokens")
        token_ids = self.tokenizer.encode(text, add_special_tokens)
        bos = self.tokenizer.bos_token_id
        has_two = add_special_tokens and bos is not None and token_ids[:2] == [bos, bos]
        return token_ids[1:] if has_two else token_ids

    @property
    def num_special_tokens(self) -> tuple[int, int]:
        """Number of tokens that the tokenizer puts before and after each text."""
        with_all, alone = (self.tokenizer.encode("a", is_added) for is_added in (True, False))
        places = range(len(with_all) - len(alone) + 1)
        first = next((i for i in places if with_all[i : i + len(alone)] == alone), 0)
        return first, max(0, len(with_all) - first - len(alone))

    def prefixed(self, request: GenerateRequest, prompts: TextPrompts) -> GenerateRequest:
        """Return a request whose text has its prefix, which its mean may leave out.

        Left out are the tokens of the prefix alone, with those that the tokenizer puts before it,
        as in sentence-transformers. Raises InvalidParameterError for a prompt that is not there.
        """
        found, task, text = request.with_prefix(prompts), request.task, request.prompt
        reads_all = isinstance(task, Pool) and task.kind.needs_whole_prompt
        if not reads_all or self.card.vectors.includes_prompts or found.prompt == text:
            return found
        assert isinstance(text, str), "tokens have no prefix"
        assert isinstance(found.prompt, str)
        prefix = found.prompt[: len(found.prompt) - len(text)]
        num_tokens = len(self.tokenize(prefix, add_special_tokens=request.add_special_tokens))
        if request.add_special_tokens:
            num_tokens -= min(1, self.num_special_tokens[1])
        task = msgspec.structs.replace(task, num_left_out=num_tokens)
        return msgspec.structs.replace(found, task=task)

    def _too_long(self, size: str) -> PromptTooLongError:
        of_output = " (max_model_len), prompt and output together"
        return PromptTooLongError(
            f"the prompt has {size}; model {self.card.name!r} takes at most "
            f"{self.card.longest_prompt} tokens{'' if self.card.encoder else of_output}",
            param="prompt",
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens, _MAX_CUT_EXCESS)

    def tokenize_pair(self, first: str, second: str) -> PairTokens:
        if max(len(first), len(second)) > self.card.max_model_len * MAX_TOKEN_CHARACTERS:
            raise self._too_long(f"{len(first) + len(second)} characters")
        return self.tokenizer.encode_pair(first, second)

    def kept_tokens(self, request: GenerateRequest) -> tuple[int, int]:
        """Return how many tokens at both ends of a text stay when it is cut."""
        assert request.truncation is not None, "only a text with a limit is cut"
        # A vector may be that of the token which the tokenizer puts at the end.
        has_frame = isinstance(request.task, Pool) and isinstance(request.prompt, str)
        if request.truncation.kept is None and has_frame and request.add_special_tokens:
            return self.num_special_tokens
        return request.truncation.kept or (0, 0)

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
