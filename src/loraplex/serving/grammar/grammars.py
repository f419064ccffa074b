"""Grammars at admission: compiled in a process of their own, and remembered."""

import asyncio
import collections
import concurrent.futures
from typing import Final

import msgspec

from loraplex.core.errors import ErrorInfo, InvalidParameterError, QueueFullError, error_from_info
from loraplex.core.grammar import DEFAULT_LIMITS, MAX_GRAMMAR_CHARACTERS, Grammar, GrammarLimits
from loraplex.core.sampling_params import SamplingParams
from loraplex.serving.grammar.check_messages import CheckSetup
from loraplex.serving.grammar.check_process import CheckProcess
from loraplex.text.tokenizer import Tokenizer

_MAX_REMEMBERED_CHARACTERS: Final = 1 << 23
_MAX_REFUSED: Final = 256
"""Grammars of which it is remembered why they are refused: they may have taken long."""
_MAX_WAITING_CHARACTERS: Final = 1 << 25
"""Of all grammars that wait to be compiled."""


class Grammars:
    """Of one model. Grammars wait for each other, other requests do not."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._check: CheckProcess | None = None  # made in the thread, with the first grammar
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._compiled: collections.OrderedDict[Grammar, Grammar] = collections.OrderedDict()
        self._refused: collections.OrderedDict[Grammar, ErrorInfo] = collections.OrderedDict()
        self._num_characters = 0
        self._waiting_characters = 0

    async def compiled(self, sampling: SamplingParams) -> SamplingParams:
        """With its grammar as engines take it. Raises InvalidParameterError for a wrong one."""
        if sampling.grammar is None:
            return sampling
        return msgspec.structs.replace(sampling, grammar=await self._compile(sampling.grammar))

    @property
    def num_remembered(self) -> int:
        return len(self._compiled)

    def close(self) -> None:
        """What is being compiled fails."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        if self._check is not None:
            self._check.close()

    async def _compile(self, grammar: Grammar) -> Grammar:
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidParameterError(
                f"the grammar has {len(grammar.text)} characters; at most "
                f"{MAX_GRAMMAR_CHARACTERS} are allowed",
                param="grammar",
            )
        if grammar in self._refused:
            self._refused.move_to_end(grammar)
            raise error_from_info(self._refused[grammar])
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = await self._compile_beside(grammar)
            self._remember(grammar, compiled)
        self._compiled.move_to_end(grammar)
        return compiled

    async def _compile_beside(self, grammar: Grammar) -> Grammar:
        if self._waiting_characters + len(grammar.text) > _MAX_WAITING_CHARACTERS:
            raise QueueFullError(
                f"grammars of {self._waiting_characters} characters wait to be compiled",
                retry_after_seconds=2,
            )
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar")
        loop = asyncio.get_running_loop()
        self._waiting_characters += len(grammar.text)
        try:
            return await loop.run_in_executor(self._thread, self._compile_in_thread, grammar)
        except InvalidParameterError as error:
            self._refused[grammar] = error.to_info()
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise
        finally:
            self._waiting_characters -= len(grammar.text)

    def _compile_in_thread(self, grammar: Grammar) -> Grammar:
        if self._check is None:
            tokenizer = self._tokenizer
            names = {
                token_id: tokenizer.token_bytes(token_id)
                for token_id in range(tokenizer.vocab_size)
                if tokenizer.is_special(token_id)
            }
            self._check = CheckProcess(CheckSetup(names, tokenizer.vocab_size, self._limits))
        return self._check.compiled(grammar)

    def _remember(self, grammar: Grammar, compiled: Grammar) -> None:
        if grammar not in self._compiled:
            self._num_characters += len(grammar.text) + len(compiled.text)
        self._compiled[grammar] = compiled
        while self._num_characters > _MAX_REMEMBERED_CHARACTERS:
            oldest, form = self._compiled.popitem(last=False)
            self._num_characters -= len(oldest.text) + len(form.text)
