"""vLLM's object structured_outputs: its options."""

import json

import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.structured_outputs import structured_outputs


def grammars_of(**fields: object) -> list[Grammar]:
    return list(structured_outputs("structured_outputs", fields))


@pytest.mark.parametrize(
    "fields", [{"json": {"type": "object"}}, {"json": '{"type": "object"}'}, {"json_object": True}]
)
def test_json_without_white_space(fields: dict[str, object]) -> None:
    (grammar,) = grammars_of(**fields, disable_any_whitespace=True)
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    assert schema == {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    for neutral in (False, None):
        (usual,) = grammars_of(**fields, disable_any_whitespace=neutral)
        assert json.loads(usual.text) == {"type": "object"}


def test_options_in_the_schema_win() -> None:
    schema = {"x-guidance": {"whitespace_flexible": True, "item_separator": ", "}}
    (grammar,) = grammars_of(json=schema, disable_any_whitespace=True)
    assert json.loads(grammar.text) == schema


def test_other_constraints_are_as_they_are() -> None:
    assert grammars_of(regex="a", disable_any_whitespace=True) == grammars_of(regex="a")
    assert grammars_of(disable_any_whitespace=True) == []


def test_another_value_is_an_error() -> None:
    with pytest.raises(InvalidParameterError) as error:
        grammars_of(json={}, disable_any_whitespace="yes")
    assert error.value.param == "structured_outputs.disable_any_whitespace"
