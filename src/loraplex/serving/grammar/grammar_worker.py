"""Sandbox process that checks grammars and brings them into llguidance's form.

Serving imports the setup message from here, so llguidance is imported where it is used.
"""

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarLimits
from loraplex.serving.sandbox import worker


class GrammarSetup(msgspec.Struct, frozen=True):
    """First message to the process: the model whose grammars it checks."""

    special_tokens: dict[int, bytes]
    vocab_size: int
    limits: GrammarLimits


def make_task(setup: bytes) -> worker.Task:
    """Return the function which compiles one grammar to the text for the engine."""
    from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens  # noqa: PLC0415

    model = msgspec.msgpack.decode(setup, type=GrammarSetup)
    check = GrammarCheck(SpecialTokens(model.special_tokens, model.vocab_size), model.limits)

    def compile_grammar(request: bytes) -> bytes:
        grammar = msgspec.msgpack.decode(request, type=Grammar)
        try:
            return check.compiled(grammar).text.encode()
        except (MemoryError, RecursionError) as failed:
            reason = f"the grammar cannot be compiled: {type(failed).__name__}"
            raise InvalidParameterError(reason, param="grammar") from failed

    return compile_grammar


if __name__ == "__main__":
    import loraplex.serving.grammar.check  # noqa: F401 - before a task waits for it

    worker.main(make_task)
