"""A Triton server over an EchoService and its clients; a file may bring a backend of its own."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from support.echo_service import EchoService
from support.served_triton import ServedTriton, served_triton


@pytest.fixture
def backend() -> EchoService:
    return EchoService()


@pytest.fixture
def triton(backend: EchoService) -> Iterator[ServedTriton]:
    with served_triton(backend) as triton:
        yield triton
    assert triton.service.num_active == 0


@pytest.fixture
def grpc_client(triton: ServedTriton) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        yield client


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def wire(request: pytest.FixtureRequest, triton: ServedTriton) -> Iterator[tuple[ModuleType, Any]]:
    """A tritonclient module and its client."""
    address = triton.http if request.param is tritonclient.http else triton.grpc
    with request.param.InferenceServerClient(address) as client:
        yield request.param, client


@pytest.fixture
def said() -> list[str]:
    """The lines of a client program."""
    return []


@pytest.fixture
def decoupled() -> Iterator[ServedTriton]:
    """A server whose one model takes no calls."""
    only = ModelDeclaration(
        name="tensorrt_llm",
        kind=TENSORRT_LLM,
        base_model="echo",
        max_batch_size=4,
        is_decoupled=True,
    )
    with served_triton(EchoService(), declarations=[only]) as triton:
        yield triton
