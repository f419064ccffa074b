"""Stop strings through a whole generation: any text, any steps, any stops, one completion.

The reference gives out one character after the other and looks at what it has. The engine is a
script: its tokens come in steps of any size, and some are merged before they are read.
"""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.output import EngineOutput, FinishReason, SequenceDelta
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.generation import Generation
from loraplex.serving.text.detokenizer import IncrementalDetokenizer
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.engine_requests import engine_request
from support.examples import examples
from support.tiny_tokenizer_pipelines import PIPELINES

FAMILIES = ("byte-level", "llama-sentencepiece", "word-piece", "gemma", "qwen2", "phi3")

PARTS = st.one_of(
    st.text(alphabet="ab \n", max_size=4),
    st.sampled_from(
        ["Hello", "世界", "👨‍👩‍👧", "e\u0301", "</s>", "<|end|>", "<tool_call>", " don't", " ."]
    ),
)
TEXTS = st.lists(PARTS, max_size=10).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {**tiny_tokenizers.FAMILIES, **PIPELINES}
    return {name: load_tokenizer(made[name](tmp_path_factory.mktemp(name))) for name in FAMILIES}


def draw_stops(data, text: str) -> tuple[str, ...]:
    """Some of the text, at any place, and some that are not; as in a text, one in another."""
    stops = data.draw(st.lists(st.text("ab \n世", min_size=1, max_size=4), max_size=2))
    for _ in range(data.draw(st.integers(0, 3))):
        if text:
            start = data.draw(st.integers(0, len(text) - 1))
            stops.append(text[start : start + data.draw(st.integers(1, 12))])
            if data.draw(st.booleans()):
                stops[-1] += data.draw(st.sampled_from(["a", " ", "界"]))
    return tuple(dict.fromkeys(stops))


def reference(tokenizer, prompt, shown, sampling) -> tuple[str, str | None, int]:
    """(text, stop string or None, tokens until it was there)."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt, skip_special_tokens=sampling.skip_special_tokens
    )
    text = ""
    for index, token_id in enumerate(shown):
        for char in detokenizer.push([token_id], final=index == len(shown) - 1):
            text += char
            stop = max((s for s in sampling.stop if text.endswith(s)), key=len, default=None)
            if stop is not None:
                return text if sampling.include_stop_in_output else text[: -len(stop)], stop, index
    return text, None, len(shown)


def deltas(data, ids, reason, stop_token_id) -> list[SequenceDelta]:
    """The token that ends a sequence comes with the news of its end."""
    places = st.integers(0, max(len(ids) - 1, 0))
    cuts = sorted(data.draw(st.lists(places, max_size=len(ids) + 1)))
    parts = [tuple(ids[a:b]) for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    steps = [SequenceDelta(0, part) for part in parts[:-1] if part]
    return [*steps, SequenceDelta(0, parts[-1], finish_reason=reason, stop_token_id=stop_token_id)]


class Engine:
    def __init__(self) -> None:
        self.aborted: list[tuple[int, int | None]] = []

    def abort(self, request_id, sequence_index=None) -> None:
        self.aborted.append((request_id, sequence_index))


async def generate(tokenizer, prompt, sampling, steps, merges):
    """(what each output gave, the engine)."""
    stream, engine = OutputStream(), Engine()
    request = GenerateRequest(request_id=1, model="m", prompt="x", task=Generate(sampling))
    admitted = engine_request(
        tuple(prompt), sampling, eos_token_ids=(tokenizer.eos_token_id,), deadline_ns=None
    )
    generation = Generation(request, admitted, (), tokenizer, stream, engine)
    pieces = []
    for index, delta in enumerate(steps):
        is_last = index == len(steps) - 1
        stream.put(EngineOutput(1, (delta,), finished=is_last))
        if is_last or not merges[index % len(merges)]:
            async with asyncio.timeout(60):
                while True:
                    output = await anext(generation)
                    pieces += output.sequences
                    if output.finished or (pieces and pieces[-1].finish_reason is not None):
                        break
                    if not is_last:
                        break
        if engine.aborted:
            break
    return pieces, engine


def check(tokenizer, data) -> None:
    output = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)[:60]
    if data.draw(st.booleans()):
        some = st.integers(0, tokenizer.vocab_size - 1)
        output += data.draw(st.lists(some, max_size=10))
    prompt = tokenizer.encode(data.draw(TEXTS))
    ends_by_token = data.draw(st.booleans())
    include = data.draw(st.booleans())
    skip = data.draw(st.booleans())
    reason = FinishReason.STOP if ends_by_token else FinishReason.LENGTH
    if ends_by_token:
        output = [*output, tokenizer.eos_token_id]
    shown = output[:-1] if ends_by_token and not include else output
    plain = SamplingParams(skip_special_tokens=skip, include_stop_in_output=include, max_tokens=90)
    whole, _, _ = reference(tokenizer, prompt, shown, plain)
    sampling = SamplingParams(
        stop=draw_stops(data, whole),
        skip_special_tokens=skip,
        include_stop_in_output=include,
        max_tokens=90,
        min_tokens=data.draw(st.sampled_from([0, 3, 90])),
    )
    text, stop, index = reference(tokenizer, prompt, shown, sampling)
    end = tokenizer.eos_token_id if ends_by_token else None
    steps = deltas(data, output, reason, end)
    merges = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
    pieces, engine = asyncio.run(generate(tokenizer, prompt, sampling, steps, merges))

    given_out = ""
    for piece in pieces:
        given_out += piece.text
        assert text.startswith(given_out), "a part of a stop string, or what follows it, leaked"
    assert given_out == text
    assert pieces[-1].finish_reason is (FinishReason.STOP if stop is not None else reason)
    assert pieces[-1].stop_reason == stop
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    if stop is None:
        assert token_ids == output
        assert not engine.aborted
    elif index < len(shown) - 1:
        assert token_ids == output[: index + 1]


@pytest.mark.parametrize("family", FAMILIES)
@examples(1.2)
@given(data=st.data())
def test_what_is_given_out_is_the_references(family, tokenizers, data):
    check(tokenizers[family], data)
