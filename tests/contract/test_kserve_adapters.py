"""Several adapters in the request parameter `adapters`, as tritonclient sends it."""

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from loraplex.core.adapter import ByName, ByTaskId
from loraplex.core.principal import LOCAL
from support.echo_service import EchoService
from support.naming import naming
from support.served_triton import ServedTriton
from support.triton_requests import TRUE, tensors, text_request


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr", task_id=5)
    backend.register("legal")
    return backend


def infer(wire, adapters: Any, *more: Any) -> Any:
    module, client = wire
    inputs = [*text_request(module, exclude_input_in_output=TRUE), *more]
    return client.infer("ensemble", inputs, parameters={"adapters": adapters})


def test_the_parameter_is_a_json_text(wire, backend: EchoService):
    adapters = json.dumps([{"task_id": 5, "scale": 0.5}, {"name": "legal", "scale": -1}])
    result = infer(wire, adapters)
    assert result.as_numpy("text_output")[0].decode().startswith("echo+fr+legal: ")
    chosen = backend.requests[-1].adapters
    assert [(c.key, c.scale) for c in chosen] == [(ByTaskId(5), 0.5), (ByName("legal"), -1.0)]


def test_the_response_names_all(triton: ServedTriton, backend: EchoService):
    body = {"text_input": "hi", "max_tokens": 5, "adapters": '["fr", "legal"]'}
    url = f"http://{triton.http}/v2/models/ensemble/generate"
    response = httpx.post(url, json=body, timeout=60).json()
    assert response["adapter"] == "fr,legal"
    digests = {a.name: a.digest for a in backend.adapters(LOCAL)}
    assert response["adapter_digest"] == f"{digests['fr']},{digests['legal']}"


@pytest.mark.parametrize(
    ("adapters", "named"),
    [
        ("fr:0.5", ("adapters", "JSON")),
        ("{", ("adapters", "JSON")),
        ('{"name": "fr"}', ("adapters", '{"name": "fr"}')),
        ('[{"name": "fr", "sclae": 1}]', ("sclae", "name")),
        ('[{"name": "fr", "scale": NaN}]', ("scale", "[-100, 100]", "nan")),
        ('["no"]', ("no",)),
        (json.dumps(["fr"] * 17), (17, 16)),
    ],
)
def test_errors_name_what_is_wrong(wire, adapters: str, named: tuple[object, ...]):
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, adapters)
    assert re.search(naming(*named), str(caught.value))


def test_one_way_at_a_time(wire):
    task = tensors(wire[0], lora_task_id=np.array([[5]], dtype=np.uint64))
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, '["legal"]', *task)
    assert re.search(naming("adapters", "lora_task_id"), str(caught.value))


def test_an_unknown_task_among_several_is_named(wire):
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, '[{"task_id": 5}, {"task_id": 6}]')
    assert "6" in str(caught.value)
    assert "LoRA task 5" not in str(caught.value)
