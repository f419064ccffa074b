"""Which log probabilities go with which text; a token of EchoService is a byte."""

import itertools
from collections.abc import Sequence

from loraplex.core.output import TokenLogprob
from loraplex.core.tools import CallDelta
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.frontends.openai.responses_api.writer import ContentLogprobs
from loraplex.serving.text.chat_format import CompletionDelta
from support.echo_service import EchoService


def logprobs(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(byte, -1.0, 1) for byte in text.encode()]


def streamed(
    steps: Sequence[tuple[CompletionDelta, str]], *, is_all_content: bool = False
) -> list[str]:
    """The tokens that go with each delta."""
    chosen = ContentLogprobs(TokenTexts(EchoService(), "echo"), is_all_content=is_all_content)
    return [
        "".join(entry.token for entry in chosen.of(delta, logprobs(text))) for delta, text in steps
    ]


def content(text: str) -> CompletionDelta:
    return CompletionDelta(content=text, parts=(text,))


NOTHING = CompletionDelta()
CALLED = CompletionDelta(calls=(CallDelta(index=0, name="f"),))


def test_those_of_text_that_was_held_come_with_it():
    steps = [(content("a"), "a"), (NOTHING, "b"), (content("bc"), "c")]
    assert streamed(steps, is_all_content=True) == ["a", "", "bc"]
    assert streamed(steps) == ["a", "", "bc"]


def test_tags_and_reasoning_have_none():
    thought = CompletionDelta(reasoning="a")
    steps = [(NOTHING, "<t>"), (thought, "a"), (NOTHING, "</t>"), (content("a"), " a")]
    assert streamed(steps) == ["", "", "", "a"]


def test_content_that_the_reasoning_has_too_stands_behind_it():
    chosen = ContentLogprobs(TokenTexts(EchoService(), "echo"), is_all_content=False)
    delta = CompletionDelta(reasoning="a", content="a", parts=("a",))
    tokens = [TokenLogprob(byte, -float(at), 1) for at, byte in enumerate(b"<t>a</t>a")]
    assert [entry.logprob for entry in chosen.of(delta, tokens)] == [-8.0]


def test_a_call_has_none():
    assert streamed([(content("ab"), "ab"), (CALLED, "<call>"), (content("b"), "b")]) == [
        "ab",
        "",
        "b",
    ]


def test_what_was_a_call_is_not_kept_for_the_next_text():
    assert streamed([(CALLED, "x"), (content("xy"), "y")]) == ["", ""]


def test_all_in_one():
    all_in_one = CompletionDelta(reasoning="a", content="b", calls=CALLED.calls)
    assert streamed([(all_in_one, "<t>a</t>b<call>")]) == ["b"]


def test_log_probabilities_are_sent_once():
    texts = TokenTexts(EchoService(), "echo")
    of_both = ContentLogprobs(texts, is_all_content=True).of(content("ab"), logprobs("ab"))
    items = OutputItems(itertools.count().__next__)
    delta = CompletionDelta(content="ab", parts=("a", CallDelta(index=0, name="f"), "b"))
    deltas = [e for e in items.add(delta, of_both) if isinstance(e, wire.TextDelta)]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [["a", "b"], []]
