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
from loraplex.core.task import Generate
from loraplex.frontends.streams import merge_outputs
from loraplex.serving.backend import Backend, close_outputs
from support.byte_tokenizer import BOS_TOKEN_ID, BYTE_TOKENIZER, EOS_TOKEN_ID
from support.echo_runner import echo_logprob, echo_text
from support.echo_service import EchoService


def request(prompt: str | tuple[int, ...] = "hi", **fields) -> GenerateRequest:
    sampling = {"max_tokens": 100} | {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    fields = {"request_id": 7, "model": "echo"} | fields
    return GenerateRequest(prompt=prompt, task=Generate(SamplingParams(**sampling)), **fields)


async def outputs_of(backend: Backend, generation: GenerateRequest) -> list[RequestOutput]:
    return [output async for output in await backend.generate(generation, LOCAL)]


async def whole(backend: Backend, generation: GenerateRequest) -> RequestOutput:
    return merge_outputs(await outputs_of(backend, generation))


async def test_output_names_model_and_adapter_and_ends_with_eos():
    backend = EchoService()
    card = backend.register("fr", task_id=0)
    for key in (ByName("fr"), ByTaskId(0), ByDigest(card.digest)):
        output = await whole(backend, request("héllo", adapters=(AdapterChoice(key),)))
        [sequence] = output.sequences
        assert sequence.text == echo_text("echo", ["fr"], "héllo") == "echo+fr: héllo"
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.token_ids[-1] == EOS_TOKEN_ID
        assert output.adapters[0].digest == card.digest
        assert output.num_output_tokens == len("echo+fr: héllo".encode()) + 1
    assert backend.finished == [7, 7, 7]
    assert backend.aborted == []


async def test_one_token_per_output_and_only_whole_characters():
    outputs = await outputs_of(EchoService(), request("é", max_tokens=7))
    texts = [output.sequences[0].text for output in outputs]
    assert texts == ["e", "c", "h", "o", ":", " ", "�"]
    assert outputs[-1].sequences[0].finish_reason is FinishReason.LENGTH
    assert [output.finished for output in outputs] == [False] * 6 + [True]


async def test_stop_string_is_held_back_and_cut():
    outputs = await outputs_of(EchoService(), request("STOXSTOP rest", stop=("STOP",)))
    pieces = [piece for output in outputs for piece in output.sequences]
    assert "".join(piece.text for piece in pieces) == "echo: STOX"
    assert pieces[-1].stop_reason == "STOP"
    assert "S" not in [piece.text for piece in pieces], "S may begin the stop string"
    output = await whole(
        EchoService(), request("a STOP", stop=("STOP",), include_stop_in_output=True)
    )
    assert output.sequences[0].text == "echo: a STOP"


async def test_stop_token_min_tokens_and_ignore_eos():
    [stopped] = (await whole(EchoService(), request(stop_token_ids=(ord(":"),)))).sequences
    assert (stopped.text, stopped.stop_reason) == ("echo", ord(":"))
    [longer] = (await whole(EchoService(), request(min_tokens=20))).sequences
    assert longer.text == "echo: hi" * 3
    [endless] = (await whole(EchoService(), request(ignore_eos=True, max_tokens=10))).sequences
    assert endless.text == "echo: hiec"


async def test_several_sequences_differ():
    output = await whole(EchoService(), request(n=3))
    assert [s.text for s in output.sequences] == ["echo: hi", "echo: hi #1", "echo: hi #2"]


async def test_logprobs_of_output_and_prompt():
    output = await whole(EchoService(), request(logprobs=2, prompt_logprobs=1))
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
    backend = EchoService(max_model_len=10)
    with pytest.raises(error):
        await backend.generate(generation, LOCAL)
    assert backend.finished == backend.aborted == []


async def test_planted_errors():
    backend = EchoService()
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
    backend = EchoService()
    outputs = await backend.generate(request(), LOCAL)
    for _ in range(num_read):
        await anext(outputs)
    await close_outputs(outputs)
    await close_outputs(outputs)
    assert (backend.finished, backend.aborted) == ([], [7])


async def test_closing_after_the_last_output_is_no_abort():
    backend = EchoService()
    outputs = await backend.generate(request(max_tokens=1), LOCAL)
    assert (await anext(outputs)).finished
    await close_outputs(outputs)
    assert (backend.finished, backend.aborted) == ([7], [])


async def test_adapters_are_registered_and_forgotten():
    backend = EchoService(("a", "b"))
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
    backend = EchoService()
    backend.register("x")
    with pytest.raises(PermissionDeniedError):
        await backend.generate(request(adapters=(AdapterChoice(ByName("x")),)), no_rights)
    with pytest.raises(PermissionDeniedError):
        await backend.adapter_admin.load(no_rights, model="echo", name="y", path="/y")


def test_tokenizer_round_trip_and_special_tokens():
    text = "<s>naïve 日本</s>"
    token_ids = BYTE_TOKENIZER.encode(text, False)
    assert BYTE_TOKENIZER.decode(token_ids, False) == text
    assert BYTE_TOKENIZER.decode(token_ids) == "naïve 日本"
    assert token_ids[0] == BOS_TOKEN_ID


async def test_chat_prompt():
    render = EchoService().model("echo").chats.render
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert await render(messages) == "<s>system: be kind\nuser: hi\nassistant: "
    with pytest.raises(InvalidRequestError, match="wizard"):
        await render([{"role": "wizard", "content": "hi"}])


def test_readiness():
    backend = EchoService()
    assert backend.health().ready
    assert backend.model_ready("echo")
    backend.unready_reason = "it crashed"
    assert backend.health().reason == "the engine of model 'echo' is restarting: it crashed"
    assert not backend.model_ready("echo")


TENSORS = {
    "model": "echo",
    "weights": RequestTensor("FP16", (1, 1), b"\x00\x3c"),
    "config": RequestTensor("INT32", (1, 3), bytes(12)),
}


async def test_adapters_from_tensors():
    backend = EchoService()
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
    backend = EchoService()
    backend.plant_load(AdapterExistsError("taken"))
    with pytest.raises(AdapterExistsError, match="taken"):
        await backend.adapter_admin.load_tensors(LOCAL, task_id=0, **TENSORS)
    with pytest.raises(PermissionDeniedError):
        await backend.adapter_admin.load_tensors(
            Principal("t", rights=Rights(manage=NONE)), task_id=0, **TENSORS
        )
    assert backend.adapters(LOCAL) == []
