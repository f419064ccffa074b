"""A vocabulary of bytes and a few longer tokens, for tests of grammars without a model."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.plan import RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.grammar.compiler import GrammarVocabulary
from loraplex.execution.grammar.rows import GrammarRows

EOS, EOT = 0, 1
FIRST_BYTE = 2
LONG = (b'{"', b'":', b"name", b"ab", b"abc", b"12", b" ", b"true")
TOKENS = (b"</s>", b"<eot>", *(bytes([byte]) for byte in range(256)), *LONG)
VOCAB_SIZE = len(TOKENS) + 7
"""The model has more rows than the tokenizer has tokens, as models do."""


def encode(text: str) -> list[int]:
    """Longest match first."""
    data, ids = text.encode(), []
    while data:
        size = next(s for s in range(len(data), 0, -1) if data[:s] in TOKENS[FIRST_BYTE:])
        ids.append(TOKENS.index(data[:size], FIRST_BYTE))
        data = data[size:]
    return ids


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TOKENS, frozenset({EOS, EOT}), encode)


def regex(pattern: str) -> Grammar:
    return _form(lark_grammar=f"start: /{pattern}/")


def schema(schema: dict[str, Any], **options: Any) -> Grammar:
    return _form(json_schema={**schema, "x-guidance": {"whitespace_flexible": False, **options}})


def _form(**grammar: Any) -> Grammar:
    return Grammar(GrammarKind.LLGUIDANCE, json.dumps({"grammars": [grammar]}))


def row(
    grammar: Grammar | None,
    *,
    slot: int = 0,
    outputs: Sequence[int] = (),
    ends: tuple[int, ...] = (EOS,),
    tenant: str = "",
    **sampling: Any,
) -> RowAdded:
    return RowAdded(
        slot=slot,
        sequence_id=slot,
        task=Generate(SamplingParams(grammar=grammar, **sampling), end_token_ids=ends),
        sequence_index=0,
        token_ids=(5, 6, 7, *outputs),
        num_prompt_tokens=3,
        tenant=tenant,
    )


def decode_step(slot: int = 0, drafts: Iterable[int] = ()) -> RowStep:
    drafts = tuple(drafts)
    return RowStep(slot=slot, start=3, num_tokens=1 + len(drafts), draft_token_ids=drafts)


def allowed(rows: GrammarRows, slot: int = 0, drafts: Sequence[int] = ()) -> list[set[int]]:
    """After each of the drafts and before the first: the tokens that may come."""
    drafts = tuple(drafts)
    rows.begin([decode_step(slot, drafts)])
    masks = rows.bitmasks([(slot, drafts[:size]) for size in range(len(drafts) + 1)])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(of_position).tolist()) for of_position in bits]


def ids_of(*texts: bytes) -> set[int]:
    return {TOKENS.index(text, FIRST_BYTE) for text in texts}


def decoded(token_ids: Iterable[int]) -> bytes:
    return b"".join(TOKENS[i] for i in itertools.chain(token_ids))
