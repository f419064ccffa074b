"""guided_decoding_guide_type and guided_decoding_guide -> a Grammar. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from loraplex.core.errors import InvalidTensorError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.kserve.models.inputs import Inputs

_TYPE: Final = "guided_decoding_guide_type"
_GUIDE: Final = "guided_decoding_guide"
GUIDE_FIELDS: Final = (_TYPE, _GUIDE)
_ANY_JSON: Final = Grammar(GrammarKind.JSON_SCHEMA, "{}")

_KINDS: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "json_schema": GrammarKind.JSON_SCHEMA,
        "regex": GrammarKind.REGEX,
        "ebnf_grammar": GrammarKind.EBNF,
        "lark_grammar": GrammarKind.LARK,
        "choice": GrammarKind.CHOICE,
    }
)
"""The last two are ours; `json` is any JSON and needs no guide."""


def grammar_of(inputs: Inputs) -> Grammar | None:
    """Raises InvalidTensorError for half of the pair, or an unknown type."""
    kind, guide = _one(inputs, _TYPE), _one(inputs, _GUIDE)
    if not kind:
        if guide:
            raise InvalidTensorError(
                f"input '{_GUIDE}' needs '{_TYPE}': json, {', '.join(_KINDS)}", param=_TYPE
            )
        return None
    if kind == "json":
        return _ANY_JSON
    if kind not in _KINDS:
        raise InvalidTensorError(
            f"input '{_TYPE}' is {kind!r}; it must be one of json, {', '.join(_KINDS)}",
            param=_TYPE,
        )
    if not guide:
        raise InvalidTensorError(
            f"input '{_TYPE}' {kind!r} needs the guide itself in '{_GUIDE}'", param=_GUIDE
        )
    return Grammar(_KINDS[kind], guide)


def _one(inputs: Inputs, field: str) -> str:
    return next(iter(inputs.texts(field)), "")
