"""Every row of docs/errors-kserve.md, sent with tritonclient over HTTP and gRPC."""

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from loraplex.core.errors import (
    AdapterExistsError,
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    PermissionDeniedError,
    PromptTooLongError,
    QueueFullError,
    RowFailedError,
)
from support.echo_service import EchoService
from support.served_triton import ServedTriton, served_triton
from support.triton_requests import f32, i32

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "errors-kserve.md"


class Expected(NamedTuple):
    http: int
    grpc: str | None
    fragment: str


def documented() -> dict[str, Expected]:
    """The second table of the page, by mistake."""
    section = DOCS.read_text().split("## By mistake")[1]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\S+) \| `(.+)` \|$", section, flags=re.MULTILINE)
    return {
        mistake: Expected(int(http), None if grpc == "-" else grpc, fragment)
        for mistake, http, grpc, fragment in rows
    }


EXPECTED = documented()


class Case(NamedTuple):
    """A request as tensors; `prepare` does to the backend or to a client's tensors what it must."""

    tensors: dict[str, np.ndarray]
    model: str = "ensemble"
    version: str = ""
    outputs: tuple[str, ...] = ()
    prepare: Callable[[EchoService], None] = lambda backend: None
    spoil: Callable[[dict[str, Any]], None] = lambda inputs: None


def text(value: str | bytes = "hi", batch: int = 1) -> np.ndarray:
    return np.array([[value]] * batch, dtype=object)


def ensemble(**tensors: np.ndarray) -> Case:
    return Case({"text_input": text(), "max_tokens": i32(5), **tensors})


def tensorrt(**tensors: np.ndarray) -> Case:
    core = {"input_ids": i32(1, 2, 3), "input_lengths": i32(3), "request_output_len": i32(5)}
    return Case({**core, **tensors}, model="tensorrt_llm")


WEIGHTS = np.ones((1, 2, 4), dtype=np.float16)
CONFIG = np.array([[[1, 0, 8], [2, 0, 8]]], dtype=np.int32)


def refused_adapter(error: LoraplexError) -> Case:
    """Register an adapter that the backend refuses with this error."""
    case = tensorrt(lora_weights=WEIGHTS, lora_config=CONFIG)
    return case._replace(prepare=lambda backend: backend.plant_load(error))


def truth() -> np.ndarray:
    return np.array([[True]])


def set_bytes(name: str, data: bytes) -> Callable[[dict[str, Any]], None]:
    """Other bytes than tritonclient would let us send."""

    def spoil(inputs: dict[str, Any]) -> None:
        tensor = inputs[name]
        if isinstance(tensor, tritonclient.grpc.InferInput):
            tensor._raw_content = data
        else:
            tensor._raw_data = data
            tensor._parameters["binary_data_size"] = len(data)

    return spoil


def set_datatype(name: str, datatype: str) -> Callable[[dict[str, Any]], None]:
    def spoil(inputs: dict[str, Any]) -> None:
        tensor = inputs[name]
        if isinstance(tensor, tritonclient.grpc.InferInput):
            tensor._input.datatype = datatype
        else:
            tensor._datatype = datatype

    return spoil


CASES = {
    "unknown model": ensemble()._replace(model="nope"),
    "unknown version": ensemble()._replace(version="7"),
    "unknown adapter": ensemble(lora_task_id=np.array([[99]], dtype=np.uint64)),
    "missing input": Case({"text_input": text()}),
    "unknown input": ensemble(top_q=f32(0.5)),
    "unknown output": ensemble()._replace(outputs=("text_out",)),
    "wrong data type": ensemble(max_tokens=np.array([[5]], dtype=np.int64)),
    "no such data type": ensemble()._replace(spoil=set_datatype("max_tokens", "INT31")),
    "wrong shape": ensemble(max_tokens=i32(5, 5)),
    "no batch dimension": tensorrt(input_ids=np.array([1, 2, 3], dtype=np.int32)),
    "wrong byte count": ensemble()._replace(spoil=set_bytes("max_tokens", b"\x05\x00\x00")),
    "broken string element": ensemble()._replace(
        spoil=set_bytes("text_input", b"\xc8\x00\x00\x00hi")
    ),
    "batch of two sizes": ensemble(text_input=text(batch=2)),
    "batch too large": ensemble(
        text_input=text(batch=129), max_tokens=np.full((129, 1), 5, dtype=np.int32)
    ),
    "prompt not UTF-8": ensemble(text_input=text(b"a\xff")),
    "empty prompt": ensemble(text_input=text("")),
    "empty input_ids": tensorrt(input_ids=np.zeros((1, 0), dtype=np.int32)),
    "input_lengths 0": tensorrt(input_lengths=i32(0)),
    "prompt too long": ensemble(text_input=text("x" * 5000)),
    "token id out of the vocabulary": tensorrt(input_ids=i32(1, 70000, 3)),
    "max_tokens 0": ensemble(max_tokens=i32(0)),
    "request_output_len 0": tensorrt(request_output_len=i32(0)),
    "longer than the model": tensorrt(request_output_len=i32(9999))._replace(
        prepare=lambda backend: backend.plant(
            PromptTooLongError("the prompt has 3 tokens and max_tokens is 9999", param="max_tokens")
        )
    ),
    "temperature below 0": ensemble(temperature=f32(-1)),
    "runtime_top_p above 1": tensorrt(runtime_top_p=f32(1.5)),
    "broken stop_words_list": tensorrt(
        stop_words_list=np.array([[[7, 8], [9, -1]]], dtype=np.int32)
    ),
    "no beams": ensemble(beam_width=i32(0)),
    "more outputs than beams": ensemble(beam_width=i32(2), num_return_sequences=i32(3)),
    "an unknown guide": ensemble(guided_decoding_guide_type=text("xml")),
    "a guide without a type": ensemble(guided_decoding_guide=text("a+")),
    "words without weights": ensemble(embedding_bias_words=text("a")),
    "a bias of another vocabulary": tensorrt(embedding_bias=np.ones((1, 2), dtype=np.float32)),
    "ranges of two lengths": tensorrt(
        retention_token_range_starts=i32(0, 8), retention_token_range_ends=i32(8)
    ),
    "part of a lookahead": tensorrt(lookahead_window_size=i32(4)),
    "weights without a config": tensorrt(lora_weights=WEIGHTS),
    "config without weights": tensorrt(lora_config=CONFIG),
    "weights of another type": tensorrt(lora_weights=WEIGHTS.astype(np.float64)),
    "weights that staging refuses": refused_adapter(
        InvalidAdapterError("lora_weights has to few values for attn_q: row 0")
    ),
    "weights of another base": refused_adapter(
        AdapterMismatchError("lora module attn_qkv not enabled for this model: row 0")
    ),
    "rank of the weights too large": refused_adapter(
        AdapterTooLargeError(
            "Invalid low_rank (65). low_rank must be smaller than mMaxLowRank (64): row 0"
        )
    ),
    "weights under a taken name": refused_adapter(
        AdapterExistsError("adapter '7' already exists (digest d); remove it first")
    ),
    "weights from a tenant that may not load": refused_adapter(
        PermissionDeniedError("tenant 't' may not manage adapters")
    ),
    "streaming in a unary call": tensorrt(streaming=truth()),
    "stop request without an id": tensorrt(stop=truth()),
    "shared memory": ensemble()._replace(
        spoil=lambda inputs: inputs["max_tokens"].set_shared_memory("region", 4)
    ),
    "full queue": ensemble()._replace(
        prepare=lambda backend: backend.plant(QueueFullError("8 requests are waiting"))
    ),
    "failure while it runs": ensemble()._replace(
        prepare=lambda backend: backend.plant(RowFailedError("the row failed"), after_outputs=1)
    ),
}

HTTP_ONLY = {"not JSON": b'{"inputs": ', "body too large": b" " * (2**20 + 1)}


@pytest.fixture(scope="module")
def backend() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def triton(backend: EchoService) -> Iterator[ServedTriton]:
    with served_triton(backend) as triton:
        yield triton


def infer(module: Any, client: Any, case: Case) -> None:
    inputs = {}
    for name, array in case.tensors.items():
        inputs[name] = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        inputs[name].set_data_from_numpy(array)
    case.spoil(inputs)
    outputs = [module.InferRequestedOutput(name) for name in case.outputs] or None
    client.infer(case.model, list(inputs.values()), model_version=case.version, outputs=outputs)


def test_every_documented_mistake_is_made():
    assert set(EXPECTED) == {*CASES, *HTTP_ONLY}


@pytest.mark.parametrize("mistake", CASES)
def test_over_http(triton, backend, mistake):
    CASES[mistake].prepare(backend)
    with (
        tritonclient.http.InferenceServerClient(triton.http) as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        infer(tritonclient.http, client, CASES[mistake])
    assert raised.value.status() == str(EXPECTED[mistake].http)
    assert EXPECTED[mistake].fragment in raised.value.message()
    assert triton.service.num_active == 0


@pytest.mark.parametrize("mistake", CASES)
def test_over_grpc(triton, backend, mistake):
    CASES[mistake].prepare(backend)
    with (
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        infer(tritonclient.grpc, client, CASES[mistake])
    assert raised.value.status() == f"StatusCode.{EXPECTED[mistake].grpc}"
    assert EXPECTED[mistake].fragment in raised.value.message()
    assert triton.service.num_active == 0


@pytest.mark.parametrize("mistake", HTTP_ONLY)
@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_bad_bodies(triton, mistake, action):
    url = f"http://{triton.http}/v2/models/ensemble/{action}"
    response = httpx.post(url, content=HTTP_ONLY[mistake], timeout=60)
    assert response.status_code == EXPECTED[mistake].http
    assert EXPECTED[mistake].grpc is None
    assert EXPECTED[mistake].fragment in response.json()["error"]
