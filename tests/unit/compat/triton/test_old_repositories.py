"""Repositories of older backends and their clients, from May 2024 back to October 2023."""

import re

import numpy as np
import pytest
from msgspec.structs import replace

from loraplex.core.errors import InvalidTensorError
from loraplex.core.principal import LOCAL
from loraplex.frontends.kserve.messages import InferRequest
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.tensors import from_values
from support.echo_service import EchoService
from support.naming import refused
from support.triton_repositories import merged

OUTPUTS_OF_JANUARY_2024 = (
    *("output_ids", "sequence_length", "cum_log_probs"),
    *("output_log_probs", "context_logits", "generation_logits"),
)
UNSIGNED = {
    "ensemble": ("max_tokens", "end_id", "pad_id", "top_k", "beam_width", "prompt_vocab_size"),
    "preprocessing": ("REQUEST_OUTPUT_LEN",),
    "tensorrt_llm": (
        *("request_output_len", "end_id", "pad_id", "beam_width", "runtime_top_k"),
        "prompt_vocab_size",
    ),
}


def serve(repository):
    return TritonService(EchoService(("tensorrt_llm",)), declarations=repository.declarations)


def tokens(datatype="INT32", requested=(), **flags):
    numbers = {"request_output_len": 50, "end_id": 257, "pad_id": 257, "beam_width": 1}
    tensors = [
        from_values("input_ids", "INT32", [1, 2], list(b"hi")),
        from_values("input_lengths", "INT32", [1, 1], [2]),
        *(from_values(name, datatype, [1, 1], [value]) for name, value in numbers.items()),
        *(from_values(name, "BOOL", [1, 1], [value]) for name, value in flags.items()),
    ]
    return InferRequest(model="tensorrt_llm", inputs=tuple(tensors), requested=requested)


async def responses(service, request):
    return [response async for response in await service.stream(request, LOCAL)]


def shapes(response):
    return {tensor.name: tensor.shape for tensor in response.outputs}


# ---------------------------------------------------------------- before May 2024


@pytest.fixture
def january(written):
    """Its tensorrt_llm declares the six outputs of that time."""
    pbtxt = written.path / "tensorrt_llm" / "config.pbtxt"
    head, outputs = pbtxt.read_text().split("output [", 1)
    rows, tail = outputs.split("\n]", 1)
    kept = [
        row
        for row in re.findall(r"  \{.*?\n  \}", rows, re.DOTALL)
        if re.search(r'name: "(\w+)"', row)[1] in OUTPUTS_OF_JANUARY_2024
    ]
    pbtxt.write_text(f"{head}output [\n" + ",\n".join(kept) + f"\n]{tail}")
    return serve(written.read())


async def test_all_outputs_come_in_every_response(january):
    (whole,) = await responses(january, tokens())
    (ids,) = (tensor.array for tensor in whole.outputs if tensor.name == "output_ids")
    length = ids.shape[2] - 2  # without the prompt
    assert shapes(whole) == {
        "output_ids": ids.shape,
        "sequence_length": (1, 1),
        "cum_log_probs": (1, 1),
        "output_log_probs": (1, 1, length),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
    }
    zeros = [tensor.array for tensor in whole.outputs][2:]
    assert not any(np.any(array) for array in zeros)
    pieces = await responses(january, tokens(streaming=True))
    assert len(pieces) > 2
    assert all(tuple(shapes(piece)) == OUTPUTS_OF_JANUARY_2024 for piece in pieces)


async def test_what_is_computed_is_no_zero(january):
    (response,) = await responses(january, tokens(return_log_probs=True))
    by_name = {tensor.name: tensor.array for tensor in response.outputs}
    assert by_name["cum_log_probs"].all()
    assert list(by_name) == list(OUTPUTS_OF_JANUARY_2024)


async def test_a_client_that_lists_outputs_gets_those(january):
    listed = ("output_ids", "sequence_length")
    (response,) = await responses(january, tokens(requested=listed))
    assert tuple(shapes(response)) == listed


async def test_the_ensemble_has_them_too(january):
    inputs = (
        from_values("text_input", "BYTES", [1, 1], ["hi"]),
        from_values("max_tokens", "INT32", [1, 1], [4]),
    )
    (response,) = await responses(january, InferRequest(model="ensemble", inputs=inputs))
    assert set(OUTPUTS_OF_JANUARY_2024[2:]) < set(shapes(response))


async def test_later_repositories_send_what_is_requested(written):
    (response,) = await responses(serve(written.read()), tokens())
    assert tuple(shapes(response)) == ("output_ids", "sequence_length")


# ---------------------------------------------------------------- before January 2024


async def outputs(service, model, *tensors):
    response = await service.infer(InferRequest(model=model, inputs=tensors), LOCAL)
    return {tensor.name: tensor for tensor in response.outputs}


async def by_hand(service, passed_on):
    """Text of the three models; passed_on: inputs of tensorrt_llm by outputs of preprocessing."""
    prepared = await outputs(
        *(service, "preprocessing", from_values("QUERY", "BYTES", [1, 1], ["hi"])),
        from_values("REQUEST_OUTPUT_LEN", "INT32", [1, 1], [50]),
    )
    passed_on |= {"INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths"}
    passed_on |= {"REQUEST_OUTPUT_LEN": "request_output_len"}
    found = await outputs(
        *(service, "tensorrt_llm"),
        *(replace(prepared[old], name=new) for old, new in passed_on.items()),
    )
    decoded = await outputs(
        *(service, "postprocessing"),
        replace(found["output_ids"], name="TOKENS_BATCH"),
        replace(found["sequence_length"], name="SEQUENCE_LENGTH"),
    )
    return decoded["OUTPUT"].array.tolist()


async def at_once(service, model, *tensors):
    text = from_values("text_input", "BYTES", [1, 1], ["hi"])
    length = from_values("max_tokens", "INT32", [1, 1], [50])
    return (await outputs(service, model, text, length, *tensors))["text_output"].array.tolist()


def without_end_id(written):
    """Preprocessing prepares none, so tensorrt_llm gets the client's, if there is one."""
    prepared = '{\n        key: "OUT_END_ID"\n        value: "_OUT_END_ID"\n      }'
    written.replace("ensemble", **{f"output_map {prepared}": "", '"_OUT_END_ID"': '"end_id"'})
    pbtxt = written.path / "preprocessing" / "config.pbtxt"
    text, count = re.subn(
        r',?\s*\{\s*name: "OUT_END_ID".*?\}', "", pbtxt.read_text(), flags=re.DOTALL
    )
    assert count == 1
    pbtxt.write_text(text)


async def test_an_ensemble_ends_where_its_three_models_end(written):
    """Those from before January 2024 give tensorrt_llm no end_id, unless the client sends one."""
    new = serve(written.read())
    without_end_id(written)
    repository = written.read()
    old = serve(repository)
    ended, full = await by_hand(new, {"OUT_END_ID": "end_id"}), await by_hand(old, {})
    assert len(ended[0]) < len(full[0])
    end_id = from_values("end_id", "INT32", [1, 1], [257])
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert await at_once(new, model) == ended
        assert await at_once(old, model) == full
        assert await at_once(old, model, end_id) == ended
    notes = [each for each in repository.notes.infos if "end_id" in each]
    assert ["'ensemble'" in notes[0], "'preprocessing'" in notes[1]] == [True, True]


async def test_an_ensemble_may_leave_the_prepared_end_id_out(written):
    written.replace(
        "ensemble",
        **{'"end_id"\n        value: "_OUT_END_ID"': '"end_id"\n        value: "end_id"'},
    )
    service = serve(written.read())
    assert await at_once(service, "ensemble") == await by_hand(service, {})
    assert await at_once(service, "tensorrt_llm_bls") == await by_hand(
        service, {"OUT_END_ID": "end_id"}
    )


# ---------------------------------------------------------------- before December 2023


@pytest.fixture
def autumn(written):
    """Its numbers are UINT32."""
    for model, names in UNSIGNED.items():
        pbtxt = written.path / model / "config.pbtxt"
        text = pbtxt.read_text()
        for name in names:
            declared = rf'(name: "{name}"\s+data_type: )TYPE_INT32'
            text, count = re.subn(declared, r"\1TYPE_UINT32", text)
            assert count
        pbtxt.write_text(text)
    written.replace("tensorrt_llm", **{'"max_attention_window_size"': '"max_kv_cache_length"'})
    written.fill("tensorrt_llm", max_attention_window_size="64")
    return written.read()


async def test_numbers_may_be_unsigned(autumn):
    service = serve(autumn)
    (response,) = await responses(service, tokens("UINT32"))
    assert response.outputs
    config = service.catalog.find("tensorrt_llm").metadata()
    types = {row["name"]: row["datatype"] for row in config["inputs"]}
    assert (types["request_output_len"], types["input_lengths"]) == ("UINT32", "INT32")
    assert merged(autumn, "tensorrt_llm")["max_attention_window_size"] == [64]


@pytest.mark.parametrize("datatype", ["INT64", "FP32"])
async def test_other_types_are_refused(autumn, datatype):
    with pytest.raises(InvalidTensorError, match="expects 'INT32' or 'UINT32'"):
        await responses(serve(autumn), tokens(datatype))


async def test_preprocessing_passes_a_length_on_in_its_type(autumn):
    inputs = (
        from_values("QUERY", "BYTES", [1, 1], ["hi"]),
        from_values("REQUEST_OUTPUT_LEN", "UINT32", [1, 1], [7]),
    )
    response = await serve(autumn).infer(InferRequest(model="preprocessing", inputs=inputs), LOCAL)
    (length,) = (tensor for tensor in response.outputs if tensor.name == "REQUEST_OUTPUT_LEN")
    assert (length.datatype, length.array.tolist()) == ("UINT32", [[7]])


def decoded(*lengths):
    """A request to postprocessing, of two beams."""
    ids = [list(b"hi!"), [*b"yo", -1]]
    return InferRequest(
        model="postprocessing",
        inputs=(
            from_values(
                "TOKENS_BATCH", "INT32", [1, 2, 3], [token for row in ids for token in row]
            ),
            *(from_values("SEQUENCE_LENGTH", "INT32", [1, 2], sizes) for sizes in lengths),
        ),
    )


async def test_postprocessing_without_lengths(written):
    """Where the repository declares none: its clients cannot send them."""
    pbtxt = written.path / "postprocessing" / "config.pbtxt"
    text, count = re.subn(
        r',?\s*\{\s*name: "SEQUENCE_LENGTH".*?\}', "", pbtxt.read_text(), flags=re.DOTALL
    )
    assert count == 1
    service = serve(written.read())
    with refused(
        InvalidTensorError, "SEQUENCE_LENGTH", 2, 1, "postprocessing", param="SEQUENCE_LENGTH"
    ):
        await service.infer(decoded(), LOCAL)
    pbtxt.write_text(text)
    service = serve(written.read())
    for request, expected in ((decoded(), [b"hi!", b"yo"]), (decoded([1, 2]), [b"h", b"yo"])):
        (output,) = (await service.infer(request, LOCAL)).outputs
        assert output.array.tolist() == expected
