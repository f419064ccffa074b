"""No input of any kind causes a defect, or stays without a response."""

import asyncio
import contextlib
import gc
import io
import json
import random

import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from loraplex.adapters.formats.npy import read_npy
from loraplex.compat.triton.model_folder import parse_pbtxt
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.frontends.kserve.grpc.codec import decode_request, infer_reader
from loraplex.frontends.kserve.shared_memory import SharedMemory, TenantMemory
from support.examples import examples, num_examples
from support.kserve_inputs import MODELS, changed_bytes
from support.kserve_prober import KserveProber

SEEDS = st.integers(0, 2**32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "x"]), inner)
    ),
    max_leaves=12,
)
ITEMSIZES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}
NUM_INPUTS = num_examples(30)
"""Number of inputs of the slow test."""
MAX_GROWTH_BYTES = 8 * 2**20

PBTXT = """
name: "tensorrt_llm" backend: "tensorrtllm" max_batch_size: 64
model_transaction_policy { decoupled: ${decoupled_mode} }
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
parameters: { key: "gpt_model_path" value: { string_value: "${engine_dir}" } }
"""


@examples(10)
@given(seed=SEEDS)
def test_changed_requests(seed):
    asyncio.run(KserveProber().probe(seed))


@given(document=JSON, action=st.sampled_from(["infer", "generate", "generate_stream"]))
def test_any_json(document, action):
    body = json.dumps({"inputs": [document], "text_input": document}).encode()
    asyncio.run(KserveProber().post(f"/v2/models/ensemble/{action}", {}, body))


@given(
    body=st.binary(max_size=200),
    length=st.text(alphabet="0123456789-x²", max_size=5),
    model=st.sampled_from(MODELS),
)
def test_any_bytes(body, length, model):
    headers = {"inference-header-content-length": length}
    asyncio.run(KserveProber().post(f"/v2/models/{model}/infer", headers, body))


@example(data=b"8\x00")  # the number of the raw contents, with another wire type
@given(data=st.binary(max_size=100))
def test_any_message(data):
    check_message(data)


@given(seed=SEEDS)
def test_changed_messages(seed):
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"1234", b""])
    request.inputs.add(name="x", datatype="INT32", shape=[2], contents={"int_contents": [1, 300]})
    check_message(changed_bytes(random.Random(seed), request.SerializeToString()))


def check_message(data):
    """Check that protobuf reads the same message, and that it can be decoded or refused."""
    with contextlib.suppress(LoraplexError):
        message, raw = infer_reader(max_values=1000).read_now(data)
        whole = pb.ModelInferRequest()
        whole.CopyFrom(message)
        whole.raw_input_contents.extend(map(bytes, raw))
        assert whole == pb.ModelInferRequest.FromString(data)
        decode_request(message, raw, TenantMemory(SharedMemory(), "t"))


@given(seed=SEEDS)
def test_changed_configurations(seed):
    rng = random.Random(seed)
    text = changed_bytes(rng, PBTXT.encode()).decode(errors="replace")
    with contextlib.suppress(ConfigError):
        parse_pbtxt(text, "config.pbtxt")


@given(seed=SEEDS)
def test_changed_arrays(seed, tmp_path_factory):
    rng = random.Random(seed)
    buffer = io.BytesIO()
    np.save(buffer, np.arange(12, dtype=np.float16).reshape(3, 4))
    path = tmp_path_factory.getbasetemp() / "fuzz.npy"
    path.write_bytes(changed_bytes(rng, buffer.getvalue()))
    with contextlib.suppress(LoraplexError):
        tensor = read_npy(path, 2**20)
        assert tensor.num_bytes == tensor.num_values * ITEMSIZES[tensor.dtype]


@pytest.mark.slow
def test_many_inputs_take_no_memory():
    """Memory stays bounded; -s shows the figures."""

    async def run() -> tuple[int, int, dict[str, int]]:
        prober, before = KserveProber(), 0
        for seed in range(NUM_INPUTS):
            if seed == NUM_INPUTS // 5:
                before = _resident_bytes()
            await prober.probe(seed)
        return before, _resident_bytes(), prober.statuses

    before, after, statuses = asyncio.run(run())
    print(f"\n{NUM_INPUTS} inputs: {before} -> {after} bytes resident; statuses {statuses}")
    assert after - before < MAX_GROWTH_BYTES
    assert {"HTTP 200", "HTTP 400", "gRPC OK", "gRPC INVALID_ARGUMENT"} <= set(statuses)


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
