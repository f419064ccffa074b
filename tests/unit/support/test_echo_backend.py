import pytest

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterChoice, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InternalError,
    InvalidParameterError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    QueueFullError,
    TokenOutOfVocabularyError,
)
from loraplex.core.output import FinishReason, RequestOutput
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.streams import merge_outputs
from loraplex.serving.backend import Backend, close_outputs
from loraplex.testing import echo_tokenizer
from loraplex.testing.echo_backend import EchoBackend
from loraplex.testing.echo_model import echo_chat_prompt
from loraplex.testing.echo_sequence import echo_logprob, echo_text


def request(prompt: str | tuple[int, ...] = "hi", **fields) -> GenerateRequest:
    sampling = {"max_tokens": 100} | {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    fields = {"request_id": 7, "model": "echo"} | fields
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(**sampling), **fields)


async def outputs_of(backend: Backend, generation: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in await backend.generate(generation, LOCAL)]


async def whole(backend: Backend, generation: GenerateRequest) -> RequestOutput:
    return merge_outputs(await outputs_of(backend, generation))


async def test_output_names_model_and_adapter_and_ends_with_eos():
    backend = EchoBackend()
    card = backend.register("fr", task_id=0)
    for key in (ByName("fr"), ByTaskId(0), ByDigest(card.digest)):
        output = await whole(backend, request("héllo", adapters=(AdapterChoice(key),)))
        [sequence] = output.sequences
        assert sequence.text == echo_text("echo", ["fr"], "héllo") == "echo+fr: héllo"
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.token_ids[-1] == echo_tokenizer.EOS_TOKEN_ID
        assert output.adapters[0].digest == card.digest
        assert output.num_output_tokens == len("echo+fr: héllo".encode()) + 1
    assert backend.finished == [7, 7, 7]
    assert backend.aborted == []


async def test_one_token_per_output_and_only_whole_characters():
    outputs = await outputs_of(EchoBackend(), request("é", max_tokens=7))
    texts = [output.sequences[0].text for output in outputs]
    assert texts == ["e", "c", "h", "o", ":", " ", "�"]
    assert outputs[-1].sequences[0].finish_reason is FinishReason.LENGTH
    assert [output.finished for output in outputs] == [False] * 6 + [True]


async def test_stop_string_is_held_back_and_cut():
    outputs = await outputs_of(EchoBackend(), request("STOXSTOP rest", stop=("STOP",)))
    assert "".join(o.sequences[0].text for o in outputs) == "echo: STOX"
    assert outputs[-1].sequences[0].stop_reason == "STOP"
    assert "S" not in [o.sequences[0].text for o in outputs], "S may begin the stop string"
    output = await whole(
        EchoBackend(), request("a STOP", stop=("STOP",), include_stop_in_output=True)
    )
    assert output.sequences[0].text == "echo: a STOP"


async def test_stop_token_min_tokens_and_ignore_eos():
    [stopped] = (await whole(EchoBackend(), request(stop_token_ids=(ord(":"),)))).sequences
    assert (stopped.text, stopped.stop_reason) == ("echo", ord(":"))
    [longer] = (await whole(EchoBackend(), request(min_tokens=20))).sequences
    assert longer.text == "echo: hi" * 3
    [endless] = (await whole(EchoBackend(), request(ignore_eos=True, max_tokens=10))).sequences
    assert endless.text == "echo: hiec"


async def test_several_sequences_differ():
    output = await whole(EchoBackend(), request(n=3))
    assert [s.text for s in output.sequences] == ["echo: hi", "echo: hi #1", "echo: hi #2"]


async def test_logprobs_of_output_and_prompt():
    output = await whole(EchoBackend(), request(logprobs=2, prompt_logprobs=1))
    assert output.sequences[0].logprobs[0] == echo_logprob(ord("e"), 2)
    assert output.prompt_logprobs == (
        None,
        echo_logprob(ord("h"), 1),
        echo_logprob(ord("i"), 1),
    )


@pytest.mark.parametrize(
    ("generation", "error"),
    [
        (request(temperature=-1.0), InvalidParameterError),
        (request(model="other"), ModelNotFoundError),
        (request((5, 999)), TokenOutOfVocabularyError),
        (request(()), InvalidRequestError),
        (request("x" * 10), PromptTooLongError),
        (request(adapters=(AdapterChoice(ByName("no")),)), AdapterNotFoundError),
    ],
)
async def test_generate_refuses_before_anything_runs(generation, error):
    backend = EchoBackend(max_model_len=10)
    with pytest.raises(error):
        await backend.generate(generation, LOCAL)
    assert backend.finished == backend.aborted == []


async def test_planted_errors():
    backend = EchoBackend()
    backend.plant(QueueFullError("full"))
    backend.plant(InternalError("broke"), after_outputs=2)
    with pytest.raises(QueueFullError):
        await backend.generate(request(), LOCAL)
    outputs = await backend.generate(request(), LOCAL)
    assert [await anext(outputs), await anext(outputs)]
    with pytest.raises(InternalError):
        await anext(outputs)
    assert (backend.finished, backend.aborted) == ([7], [])
    assert (await whole(backend, request())).finished


@pytest.mark.parametrize("num_read", [0, 1])
async def test_closing_early_is_an_abort(num_read):
    backend = EchoBackend()
    outputs = await backend.generate(request(), LOCAL)
    for _ in range(num_read):
        await anext(outputs)
    await close_outputs(outputs)
    await close_outputs(outputs)
    assert (backend.finished, backend.aborted) == ([], [7])


async def test_closing_after_the_last_output_is_no_abort():
    backend = EchoBackend()
    outputs = await backend.generate(request(max_tokens=1), LOCAL)
    assert (await anext(outputs)).finished
    await close_outputs(outputs)
    assert (backend.finished, backend.aborted) == ([7], [])


async def test_adapters_are_registered_and_forgotten():
    backend = EchoBackend(("a", "b"))
    first = await backend.adapter_admin.load(LOCAL, model="b", name="x", path="/p/1")
    with pytest.raises(AdapterExistsError):
        await backend.adapter_admin.load(LOCAL, model="b", name="x", path="/p/2")
    second = await backend.adapter_admin.load(LOCAL, model="b", name="x", path="/p/2", replace=True)
    assert first.digest != second.digest
    assert (await backend.find("x", LOCAL))[0].name == "b"
    backend.register("x", model="a")
    with pytest.raises(ModelNotFoundError, match="a:x"):
        await backend.find("x", LOCAL)
    assert await backend.find("b:x", LOCAL) == (backend.model("b").card, ByName("x"))
    ref = AdapterRef("b", "default", ByName("x"))
    await backend.adapter_admin.unload(LOCAL, ref)
    with pytest.raises(AdapterNotFoundError):
        await backend.adapter_admin.unload(LOCAL, ref)


async def test_rights_are_checked():
    no_rights = Principal(rights=Rights(use=NONE, manage=NONE))
    backend = EchoBackend()
    backend.register("x")
    with pytest.raises(PermissionDeniedError):
        await backend.generate(request(adapters=(AdapterChoice(ByName("x")),)), no_rights)
    with pytest.raises(PermissionDeniedError):
        await backend.adapter_admin.load(no_rights, model="echo", name="y", path="/y")


def test_tokenizer_round_trip_and_special_tokens():
    text = "<s>naïve 日本</s>"
    token_ids = echo_tokenizer.encode(text, add_special_tokens=False)
    assert echo_tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert echo_tokenizer.decode(token_ids) == "naïve 日本"
    assert token_ids[0] == echo_tokenizer.BOS_TOKEN_ID


def test_chat_prompt():
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert echo_chat_prompt(messages) == "<s>system: be kind\nuser: hi\nassistant: "
    with pytest.raises(InvalidRequestError, match="wizard"):
        echo_chat_prompt([{"role": "wizard", "content": "hi"}])


def test_readiness():
    backend = EchoBackend()
    assert backend.health().ready
    assert backend.model_ready("echo")
    backend.unready_reason = "draining"
    assert backend.health().reason == "draining"
    assert not backend.model_ready("echo")


TENSORS = {
    "model": "echo",
    "weights": RequestTensor("FP16", (1, 1), b"\x00\x3c"),
    "config": RequestTensor("INT32", (1, 3), bytes(12)),
}


async def test_adapters_from_tensors():
    backend = EchoBackend()
    assert await backend.adapter_admin.load_tensors(LOCAL, task_id=0, **TENSORS) == ByTaskId(0)
    key = await backend.adapter_admin.load_tensors(LOCAL, task_id=None, **TENSORS)
    [card] = backend.adapters(LOCAL)
    assert (card.name, card.task_id, key) == ("0", 0, ByDigest(card.digest))
    assert backend.adapter_tensors == [(TENSORS["weights"], TENSORS["config"])] * 2
    other = RequestTensor("FP16", (1, 1), b"\x00\x40")
    await backend.adapter_admin.load_tensors(LOCAL, task_id=0, **(TENSORS | {"weights": other}))
    [changed] = backend.adapters(LOCAL)
    assert changed.name == "0"
    assert changed.digest != card.digest


async def test_adapters_from_tensors_can_fail():
    backend = EchoBackend()
    backend.plant_load(AdapterExistsError("taken"))
    with pytest.raises(AdapterExistsError, match="taken"):
        await backend.adapter_admin.load_tensors(LOCAL, task_id=0, **TENSORS)
    with pytest.raises(PermissionDeniedError):
        await backend.adapter_admin.load_tensors(
            Principal("t", rights=Rights(manage=NONE)), task_id=0, **TENSORS
        )
    assert backend.adapters(LOCAL) == []
