"""Engine outputs become text: ends, stop strings, errors, and readers that leave."""

import asyncio
import threading

import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import EngineRestartedError, ErrorInfo
from loraplex.core.output import (
    BeamLogprobs,
    EngineOutput,
    FinishReason,
    Logits,
    LogitsFile,
    PackedLogprobs,
    PromptLogprobs,
    RequestTiming,
    ResolvedAdapter,
    SequenceDelta,
    TokenLogprob,
)
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.core.task import Generate
from loraplex.demo import BASE_PATH
from loraplex.engine.messages import StepDone, decode_event, encode
from loraplex.frontends.streams import merge_outputs, written
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.generation import Generation
from loraplex.text.tokenizer import load_tokenizer

ADAPTERS = (ResolvedAdapter("zh", "digest", 0.5),)
TIMING = RequestTiming(arrival_ns=1, last_token_ns=9)
RESTARTED = EngineRestartedError("gone").to_info()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BASE_PATH)


class Case:
    """One request, and the aborts that its engine received."""

    def __init__(self, tokenizer, make_request, **sampling) -> None:
        self.tokenizer = tokenizer
        self.stream = OutputStream()
        self.aborted: list[tuple[int, int | None]] = []
        params = SamplingParams(**sampling)
        self.generation = Generation(
            GenerateRequest(
                request_id=7, model="m", prompt="x", task=Generate(params), client_request_id="mine"
            ),
            make_request(
                7,
                prompt_token_ids=tuple(tokenizer.encode("The capital of France is")),
                task=Generate(params),
                eos_token_ids=(tokenizer.eos_token_id,),
            ),
            ADAPTERS,
            tokenizer,
            self.stream,
            self,
        )

    def abort(self, request_id: int, sequence_index: int | None = None) -> None:
        self.aborted.append((request_id, sequence_index))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def say(self, *deltas: SequenceDelta, finished: bool = False, **fields) -> None:
        timing = TIMING if finished else None
        output = EngineOutput(7, deltas, finished=finished, **({"timing": timing} | fields))
        self.stream.put(output)

    def say_text(self, text: str, index: int = 0) -> None:
        """One output per token."""
        for token_id in self.ids(text):
            self.say(SequenceDelta(index, (token_id,)))

    async def all(self) -> list:
        async with asyncio.timeout(60):
            return [output async for output in self.generation]

    async def next(self):
        async with asyncio.timeout(60):
            return await anext(self.generation)


@pytest.fixture
def case(tokenizer, make_request):
    return lambda **sampling: Case(tokenizer, make_request, **sampling)


def text_of(outputs, index: int = 0) -> str:
    return "".join(s.text for output in outputs for s in output.sequences if s.index == index)


def last_of(outputs, index: int = 0):
    return [s for output in outputs for s in output.sequences if s.index == index][-1]


async def test_increments_as_they_come(case):
    one = case()
    tokens = one.ids(" Paris is big")
    texts = []
    for token_id in tokens:
        one.say(SequenceDelta(0, (token_id,)))
        output = await one.next()
        assert output.sequences[0].token_ids == (token_id,)
        assert (output.finished, output.timing) == (False, None)
        texts.append(output.sequences[0].text)
    one.say(SequenceDelta(0, (), finish_reason=FinishReason.LENGTH), finished=True)
    last = await one.next()
    texts.append(last.sequences[0].text)
    assert "".join(texts) == " Paris is big"
    assert len(texts) > 2
    assert last.sequences[0].finish_reason is FinishReason.LENGTH
    assert (last.finished, last.timing) == (True, TIMING)
    assert last.num_output_tokens == len(tokens)
    assert (last.request_id, last.client_request_id, last.model) == (7, "mine", "m")
    assert last.adapters == ADAPTERS
    assert last.prompt_token_ids[-1] == one.ids(" is")[-1]
    with pytest.raises(StopAsyncIteration):
        await one.next()
    assert one.aborted == []


async def test_what_ended_it_is_known_to_be_an_end_token(case, tokenizer):
    for token_id, is_end in ((tokenizer.eos_token_id, True), (100, False), (None, False)):
        one = case()
        end = SequenceDelta(0, (token_id or 100,), (), FinishReason.STOP, token_id)
        one.say(end, finished=True)
        (output,) = await one.all()
        assert output.sequences[0].has_end_token is is_end
        assert output.sequences[0].stop_reason == (None if is_end else token_id)


async def test_a_slow_reader_gets_them_merged(case):
    one = case()
    one.say_text(" Paris is big")
    one.say(SequenceDelta(0, (), finish_reason=FinishReason.LENGTH), finished=True)
    (output,) = await one.all()
    assert text_of([output]) == " Paris is big"
    assert output.num_output_tokens == len(one.ids(" Paris is big"))
    assert output.finished


@pytest.mark.parametrize("include", [False, True])
async def test_the_end_token_is_no_text(case, tokenizer, include):
    one = case(include_stop_in_output=include)
    one.say_text(" Paris")
    eos = tokenizer.eos_token_id
    one.say(SequenceDelta(0, (eos,), (), FinishReason.STOP, eos), finished=True)
    outputs = await one.all()
    assert text_of(outputs) == " Paris"
    assert last_of(outputs).token_ids[-1] == eos
    assert last_of(outputs).finish_reason is FinishReason.STOP
    assert last_of(outputs).stop_reason is None


@pytest.mark.parametrize(("include", "text"), [(False, " Paris"), (True, " Paris is")])
async def test_a_stop_token_is_reported_and_shown_if_requested(case, include, text):
    one = case(include_stop_in_output=include)
    one.say_text(" Paris")
    (stop,) = one.ids(" is")
    one.say(SequenceDelta(0, (stop,), (), FinishReason.STOP, stop), finished=True)
    outputs = await one.all()
    assert text_of(outputs) == text
    assert last_of(outputs).stop_reason == stop
    assert last_of(outputs).token_ids[-1] == stop


@pytest.mark.parametrize(("include", "text"), [(False, " Paris is"), (True, " Paris is big")])
async def test_a_stop_string_ends_the_sequence_in_the_engine(case, include, text):
    one = case(stop=("ever", " big"), include_stop_in_output=include)
    one.say_text(" Paris is big and")
    num_tokens = len(one.ids(" Paris is big"))
    output = await one.next()
    assert text_of([output]) == text
    assert last_of([output]).finish_reason is FinishReason.STOP
    assert last_of([output]).stop_reason == " big"
    assert output.num_output_tokens == num_tokens  # what came after it does not count
    assert not output.finished
    assert one.aborted == [(7, 0)]
    one.say_text(" and this is not read")
    one.say(SequenceDelta(0, (), finish_reason=FinishReason.ABORT), finished=True)
    (last,) = await one.all()
    assert (last.sequences, last.finished, last.timing) == ((), True, TIMING)
    assert last.num_output_tokens == num_tokens
    assert one.aborted == [(7, 0)]


async def test_a_stop_string_in_the_last_tokens(case):
    """The engine has ended the sequence already: there is nothing to abort."""
    one = case(stop=("big",))
    tokens = tuple(one.ids(" Paris is big"))
    one.say(SequenceDelta(0, tokens, (), FinishReason.LENGTH), finished=True)
    (output,) = await one.all()
    assert text_of([output]) == " Paris is "
    assert last_of([output]).finish_reason is FinishReason.STOP
    assert last_of([output]).stop_reason == "big"
    assert one.aborted == []


async def test_text_that_might_become_a_stop_string_is_given_at_the_end(case):
    one = case(stop=("is bigger",))
    one.say_text(" Paris is")
    assert "is" not in text_of([await one.next()]).removeprefix(" Paris")
    one.say(SequenceDelta(0, (), finish_reason=FinishReason.LENGTH), finished=True)
    assert text_of(await one.all()).endswith("is")


async def test_several_sequences_end_each_by_itself(case):
    one = case(n=3, stop=("big",))
    one.say_text(" Paris", 2)
    one.say_text(" Paris is big", 1)
    one.say(SequenceDelta(0, tuple(one.ids(" is")), (), FinishReason.LENGTH))
    first = await one.next()
    assert {s.index for s in first.sequences if s.finish_reason} == {0, 1}
    assert one.aborted == [(7, 1)]
    one.say(
        SequenceDelta(1, (5, 6), (), FinishReason.ABORT),
        SequenceDelta(2, (), (), FinishReason.LENGTH),
        finished=True,
    )
    outputs = [first, *await one.all()]
    assert [text_of(outputs, index) for index in range(3)] == [" is", " Paris is ", " Paris"]
    assert last_of(outputs, 1).finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == sum(
        len(one.ids(text)) for text in (" is", " Paris is big", " Paris")
    )


async def test_an_error_is_raised_and_ends_the_iterator(case):
    one = case()
    one.say_text(" Paris")
    await one.next()
    one.say(finished=True, error=ErrorInfo("engine_restarted", "gone", None, 5.0))
    with pytest.raises(EngineRestartedError, match="gone") as caught:
        await one.next()
    assert caught.value.retry_after_seconds == 5.0
    with pytest.raises(StopAsyncIteration):
        await one.next()
    await one.generation.aclose()
    assert one.aborted == []


async def test_an_error_of_one_sequence_is_the_requests(case):
    one = case(n=2, stop=("Paris",))
    one.say_text(" Paris", 0)
    one.say(finished=True, error=RESTARTED)
    with pytest.raises(EngineRestartedError):
        await one.all()


@pytest.mark.parametrize("merged", [False, True])
async def test_an_error_after_all_texts_have_ended_is_none(case, merged):
    one = case(n=2, stop=("Paris",))
    outputs = []
    for index in (0, 1):
        one.say_text(" Paris", index)
        if not merged:
            outputs.append(await one.next())
    one.say(finished=True, error=RESTARTED, timing=None)
    outputs += await one.all()
    assert outputs[-1].finished
    assert outputs[-1].timing is not None
    assert {s.index for output in outputs for s in output.sequences if s.finish_reason} == {0, 1}
    assert one.aborted == [(7, 0), (7, 1)]


async def test_log_probabilities_pass(case):
    one = case(logprobs=1, prompt_logprobs=1)
    logprob = TokenLogprob(5, -0.5, 1)
    one.say(SequenceDelta(0, (5,), (logprob,)), prompt_logprobs=PromptLogprobs.of((None, logprob)))
    one.say(SequenceDelta(0, (5,), (logprob,)))
    output = await one.next()
    assert output.prompt_logprobs == (None, logprob)
    assert [s.logprobs for s in output.sequences] == [(logprob,)] * 2


async def test_closing_before_the_first_output_aborts(case):
    one = case()
    await one.generation.aclose()
    assert one.aborted == [(7, None)]
    await one.generation.aclose()
    assert one.aborted == [(7, None)]
    assert await one.all() == []


async def test_closing_after_the_end_changes_nothing(case):
    one = case()
    one.say(SequenceDelta(0, (), finish_reason=FinishReason.ABORT), finished=True)
    await one.all()
    await one.generation.aclose()
    assert one.aborted == []


async def test_a_cancelled_reader_can_still_close(case):
    one = case()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(one.generation), 0.001)
    await one.generation.aclose()
    assert one.aborted == [(7, None)]


async def test_tokens_behind_a_stop_string_do_not_count(case):
    """Several tokens of one step are as good as several steps."""
    one = case(stop=(" is",), logprobs=0)
    tokens = one.ids(" Paris is big")
    scores = tuple(TokenLogprob(token_id, -1.0, 1) for token_id in tokens)
    one.say(SequenceDelta(0, tuple(tokens), scores))
    output = await one.next()
    num_kept = len(one.ids(" Paris is"))
    [sequence] = output.sequences
    assert sequence.text == " Paris"
    assert sequence.token_ids == tuple(tokens[:num_kept])
    assert sequence.logprobs == scores[:num_kept]
    assert output.num_output_tokens == num_kept
    assert one.aborted == [(7, 0)]


async def test_a_stop_sequence_is_no_text(case):
    run = tuple(case().ids(" is big"))
    one = case(stop_token_sequences=(run,))
    paris = tuple(one.ids(" Paris"))
    for token_id in (*paris, *run[:-1]):
        one.say(SequenceDelta(0, (token_id,)))
    last = SequenceDelta(0, (run[-1],), finish_reason=FinishReason.STOP)
    one.say(last, finished=True)
    outputs = await one.all()
    assert text_of(outputs) == " Paris"
    assert outputs[-1].num_output_tokens == len(paris) + len(run)
    assert last_of(outputs).stop_reason is None


async def test_beams_come_whole(case):
    one = case(n=2, beam=BeamSearch(width=3))
    score = TokenLogprob(1, -1.0, 1)
    one.say(prompt_logprobs=PromptLogprobs.of((None, score)))
    one.say(
        *(
            SequenceDelta(
                index,
                tuple(one.ids(text)),
                finish_reason=FinishReason.LENGTH,
                cumulative_logprob=-index - 0.5,
            )
            for index, text in enumerate([" Paris", " big"])
        ),
        finished=True,
    )
    [output] = await one.all()
    assert [(s.text, s.cumulative_logprob) for s in output.sequences] == [
        (" Paris", -0.5),
        (" big", -1.5),
    ]
    assert output.prompt_logprobs == (None, score), "kept until something came with it"


async def test_no_event_loop_decodes_the_log_probabilities_of_beams(case, monkeypatch):
    """Those of 64 hypotheses with 20 likely tokens at each position take tenths of a second."""
    threads, decode = [], PackedLogprobs._piece

    def counted(self, index):
        threads.append(threading.current_thread())
        return decode(self, index)

    monkeypatch.setattr(PackedLogprobs, "_piece", counted)
    one = case(n=2, beam=BeamSearch(width=2), logprobs=5, stop=("big",))
    token_ids = tuple(one.ids(" Paris" * 100 + " big" + " Paris" * 100))
    scores = [TokenLogprob(token_id, -1.0, 1, ((token_id, -1.0),) * 5) for token_id in token_ids]
    deltas = tuple(
        SequenceDelta(index, token_ids, BeamLogprobs.of(scores), FinishReason.LENGTH)
        for index in range(2)
    )
    event = decode_event(
        encode(StepDone((EngineOutput(7, deltas, finished=True, timing=TIMING),), EngineStats()))
    )
    for output in event.outputs:
        one.stream.put(output)
    whole = merge_outputs(await one.all())
    assert not threads
    found = await written(lambda: [list(each.logprobs) for each in whole.sequences], whole)
    num_shown = len(whole.sequences[0].token_ids)
    assert 100 < num_shown < len(token_ids), "up to the stop string"
    assert found == [scores[:num_shown]] * 2
    assert len(whole.sequences[0].logprobs) == num_shown
    assert threads
    assert threading.current_thread() not in threads


async def test_the_best_come_at_the_end(case):
    one = case(n=1, best_of=2)
    for index, (text, logprob) in enumerate([(" Rome", -2.0), (" Paris", -1.0)]):
        for token_id in one.ids(text):
            one.say(SequenceDelta(index, (token_id,), (TokenLogprob(token_id, logprob, 1),)))
    ends = (SequenceDelta(i, finish_reason=FinishReason.LENGTH) for i in range(2))
    one.say(*ends, finished=True)
    [output] = await one.all()
    [best] = output.sequences
    assert (best.index, best.text, best.logprobs) == (0, " Paris", ())
    assert output.num_output_tokens == len(one.ids(" Rome")) + len(one.ids(" Paris"))


def logits_file(folder, name: str) -> LogitsFile:
    path = folder / name
    path.write_bytes(name.encode())
    return LogitsFile(str(path), 1)


async def test_logits_are_read_and_their_files_deleted(case, tmp_path):
    one = case(return_logits=True, return_prompt_logits=True)
    one.say(
        SequenceDelta(0, tuple(one.ids(" Paris"))[:1], logits=(logits_file(tmp_path, "new"),)),
        prompt_logits=(logits_file(tmp_path, "prompt"),),
    )
    output = await one.next()
    assert output.prompt_logits == (Logits(b"prompt", 1),)
    assert output.sequences[0].logits == (Logits(b"new", 1),)
    assert list(tmp_path.iterdir()) == []


async def test_a_reader_that_left_leaves_no_file(case, tmp_path):
    one = case(return_logits=True)
    token_ids = tuple(one.ids(" Paris"))[:1]
    one.say(SequenceDelta(0, token_ids, logits=(logits_file(tmp_path, "unread"),)))
    await one.generation.aclose()
    assert list(tmp_path.iterdir()) == []
    one.say(SequenceDelta(0, token_ids, logits=(logits_file(tmp_path, "late"),)))
    assert list(tmp_path.iterdir()) == []
