"""Grammars at admission: compiled in a process of their own, and remembered."""

import collections
from typing import Final

import msgspec

from loraplex.core.errors import (
    ErrorInfo,
    InvalidParameterError,
    UnsupportedFeatureError,
    error_from_info,
)
from loraplex.core.grammar import (
    DEFAULT_LIMITS,
    MAX_GRAMMAR_CHARACTERS,
    Grammar,
    GrammarKind,
    GrammarLimits,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.serving.grammar.grammar_worker import GrammarSetup
from loraplex.serving.sandbox.process import Sandbox, SandboxKind
from loraplex.text.tokenizer import Tokenizer

MAX_SECONDS: Final = 0.5
"""Processor time for one grammar. The engine compiles a valid one again, and its rows with grammars
wait for that."""
GRAMMARS: Final = SandboxKind(
    module="loraplex.serving.grammar.grammar_worker",
    work="grammars",
    max_seconds=MAX_SECONDS,
    max_bytes=2 << 30,
    error=InvalidParameterError,
    param="grammar",
    too_slow=f"the grammar is too large: it takes more than {MAX_SECONDS:g} s to compile",
    too_big="the grammar is too large: it takes too much memory to compile",
)
_MAX_REMEMBERED_CHARACTERS: Final = 1 << 23
_ENTRY_CHARACTERS: Final = 512
"""What a remembered grammar takes in addition to its text, and that of its form, at a byte each."""
_MAX_REFUSED: Final = 256
"""Refused grammars whose error is remembered: each may have taken long."""


class Grammars:
    """Compiler of one model's grammars. Those of a tenant wait for each other; no others do."""

    def __init__(self, tokenizer: Tokenizer, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._sandbox = Sandbox(GRAMMARS, self._setup)
        self._compiled: collections.OrderedDict[Grammar, Grammar] = collections.OrderedDict()
        self._refused: collections.OrderedDict[Grammar, ErrorInfo] = collections.OrderedDict()
        self._num_characters = 0

    async def compiled(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with their grammar in the form that engines take.

        Raises InvalidParameterError for a grammar that is wrong or exceeds a limit.
        """
        if sampling.grammar is None:
            return sampling
        return msgspec.structs.replace(sampling, grammar=await self._compile(sampling.grammar))

    @property
    def num_remembered(self) -> int:
        return len(self._compiled)

    def close(self) -> None:
        """End the processes; grammars that are being compiled fail."""
        self._sandbox.close()

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
            compiled = await self._compile_in_sandbox(grammar)
            self._remember(grammar, compiled)
        self._compiled.move_to_end(grammar)
        return compiled

    async def _compile_in_sandbox(self, grammar: Grammar) -> Grammar:
        try:
            compiled = await self._sandbox.run(msgspec.msgpack.encode(grammar))
        except (InvalidParameterError, UnsupportedFeatureError) as error:
            self._refused[grammar] = error.to_info()
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise
        return Grammar(GrammarKind.LLGUIDANCE, compiled.decode())

    def _setup(self) -> bytes:
        tokenizer = self._tokenizer
        names = {
            token_id: tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.vocab_size)
            if tokenizer.is_special(token_id)
        }
        setup = GrammarSetup(names, tokenizer.vocab_size, self._limits)
        return msgspec.msgpack.encode(setup)

    def _remember(self, grammar: Grammar, compiled: Grammar) -> None:
        if grammar not in self._compiled:
            self._num_characters += _num_characters(grammar, compiled)
        self._compiled[grammar] = compiled
        while self._num_characters > _MAX_REMEMBERED_CHARACTERS:
            oldest, form = self._compiled.popitem(last=False)
            self._num_characters -= _num_characters(oldest, form)


def _num_characters(grammar: Grammar, compiled: Grammar) -> int:
    """Return what a remembered grammar counts for."""
    return len(grammar.text) + len(compiled.text) + _ENTRY_CHARACTERS
