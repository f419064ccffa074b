"""Grammars at admission: compiled beside the event loop, and remembered."""

import asyncio
import collections
import concurrent.futures
from typing import TYPE_CHECKING, Final

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import DEFAULT_LIMITS, MAX_GRAMMAR_CHARACTERS, Grammar, GrammarLimits
from loraplex.core.sampling_params import SamplingParams
from loraplex.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from loraplex.serving.grammar.check import GrammarCheck

_MAX_REMEMBERED_CHARACTERS: Final = 1 << 23


class Grammars:
    """Of one model. One thread compiles: grammars wait for each other, other requests do not."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._check: GrammarCheck | None = None  # made in the thread, with the first grammar
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._compiled: collections.OrderedDict[Grammar, Grammar] = collections.OrderedDict()
        self._num_characters = 0

    async def compiled(self, sampling: SamplingParams) -> SamplingParams:
        """With its grammar as engines take it. Raises InvalidParameterError for a wrong one."""
        if sampling.grammar is None:
            return sampling
        return msgspec.structs.replace(sampling, grammar=await self._compile(sampling.grammar))

    @property
    def num_remembered(self) -> int:
        return len(self._compiled)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _compile(self, grammar: Grammar) -> Grammar:
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidParameterError(
                f"the grammar has {len(grammar.text)} characters; at most "
                f"{MAX_GRAMMAR_CHARACTERS} are allowed",
                param="grammar",
            )
        compiled = self._compiled.get(grammar)
        if compiled is None:
            if self._thread is None:
                self._thread = concurrent.futures.ThreadPoolExecutor(
                    1, thread_name_prefix="grammar"
                )
            loop = asyncio.get_running_loop()
            compiled = await loop.run_in_executor(self._thread, self._compile_in_thread, grammar)
            self._remember(grammar, compiled)
        self._compiled.move_to_end(grammar)
        return compiled

    def _compile_in_thread(self, grammar: Grammar) -> Grammar:
        if self._check is None:
            # Not at the top: no start of a server is to wait for llguidance.
            from loraplex.serving.grammar.check import (  # noqa: PLC0415
                GrammarCheck,
                SpecialTokens,
            )

            tokenizer = self._tokenizer
            names = {
                token_id: tokenizer.token_bytes(token_id)
                for token_id in range(tokenizer.vocab_size)
                if tokenizer.is_special(token_id)
            }
            special_tokens = SpecialTokens(names, tokenizer.vocab_size)
            self._check = GrammarCheck(special_tokens, self._limits)
        return self._check.compiled(grammar)

    def _remember(self, grammar: Grammar, compiled: Grammar) -> None:
        if grammar not in self._compiled:
            self._num_characters += len(grammar.text) + len(compiled.text)
        self._compiled[grammar] = compiled
        while self._num_characters > _MAX_REMEMBERED_CHARACTERS:
            oldest, form = self._compiled.popitem(last=False)
            self._num_characters -= len(oldest.text) + len(form.text)
