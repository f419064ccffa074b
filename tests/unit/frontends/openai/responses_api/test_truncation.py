"""Truncation leaves out only as many of the oldest turns as it must."""

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.core.principal import Principal
from loraplex.frontends.openai.responses_api import endpoints
from loraplex.frontends.openai.schema import ChatBody

RULES = [{"role": "system", "content": "r" * 10}, {"role": "developer", "content": "r" * 10}]
TURNS = [
    turn
    for _ in range(7)
    for turn in (
        {"role": "user", "content": "u" * 10},
        {"role": "assistant", "content": "a" * 10},
    )
]
LAST = {"role": "user", "content": "u" * 10}


@pytest.fixture(autouse=True)
def a_character_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count_tokens(_capacity: Any, body: ChatBody, _target: Any) -> int:
        return sum(len(str(message["content"])) for message in body.messages)

    monkeypatch.setattr(endpoints, "count_tokens", count_tokens)


async def kept(
    messages: list[Any], max_model_len: int, max_input_len: int | None = None, **fields: Any
) -> list[Any]:
    card = SimpleNamespace(max_model_len=max_model_len, max_input_len=max_input_len)

    async def target(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(model=card)

    dialect = SimpleNamespace(target=target)
    capacity: Any = SimpleNamespace(options=SimpleNamespace(dialect=dialect))
    body = ChatBody.model_validate({"model": "m", "messages": messages, **fields})
    made = await endpoints.fitting(capacity, body, Principal())
    return list(made.messages)


@pytest.mark.parametrize("num_turns", range(8))
@pytest.mark.parametrize("rules", [[], RULES], ids=["without rules", "with rules"])
async def test_the_maximum_that_fits(rules: list[Any], num_turns: int) -> None:
    given = [*rules, *TURNS, LAST]
    fit = [*rules, *TURNS[len(TURNS) - 2 * num_turns :], LAST]
    num_tokens = 10 * len(fit)
    assert await kept(given, num_tokens + 1) == fit, "the output has a token"
    assert await kept(given, num_tokens + 20) == fit
    assert await kept(given, num_tokens + 5, max_completion_tokens=5) == fit
    assert await kept(given, 10_000, max_input_len=num_tokens) == fit
    if num_turns:
        less = [*rules, *TURNS[len(TURNS) - 2 * num_turns + 2 :], LAST]
        assert await kept(given, num_tokens) == less
        assert await kept(given, num_tokens + 5, max_completion_tokens=6) == less
        assert await kept(given, 10_000, max_input_len=num_tokens - 1) == less


async def test_rules_and_the_last_turn_stay_in_any_case() -> None:
    assert await kept([*RULES, *TURNS, LAST], 1) == [*RULES, LAST]
    assert await kept(RULES, 1) == RULES
    later = [LAST, RULES[0], LAST]
    assert await kept(later, 1) == [LAST]
