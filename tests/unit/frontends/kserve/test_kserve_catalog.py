import pytest
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import ModelNotFoundError
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.testing.echo_backend import EchoBackend


@pytest.fixture
def backend():
    return EchoBackend(("first", "second"))


@pytest.fixture
def catalog(backend):
    return Catalog(backend, max_batch_size=4)


def test_names(catalog):
    models = {model.name: (model.kind.name, model.card.name) for model in catalog.models()}
    assert models == {
        "ensemble": ("ensemble", "first"),
        "tensorrt_llm": ("tensorrt_llm", "first"),
        "first": ("ensemble", "first"),
        "second": ("ensemble", "second"),
    }


def test_a_base_model_may_be_called_ensemble():
    catalog = Catalog(EchoBackend(("a", "ensemble")))
    assert [model.name for model in catalog.models()] == ["ensemble", "tensorrt_llm", "a"]


def test_versions(catalog):
    assert catalog.find("first", "1") == catalog.find("first")
    with pytest.raises(ModelNotFoundError, match="'first' version 2 is not found"):
        catalog.find("first", "2")
    with pytest.raises(ModelNotFoundError, match="'third' is not found; the models are: ensemble"):
        catalog.find("third")


def test_metadata(catalog):
    metadata = catalog.find("tensorrt_llm").metadata()
    assert metadata["platform"] == "tensorrtllm"
    assert metadata["inputs"][0] == {"name": "input_ids", "datatype": "INT32", "shape": [-1, -1]}
    assert metadata["outputs"][0]["name"] == "output_ids"
    names = [row["name"] for row in metadata["inputs"]]
    assert "min_tokens" in names
    assert "min_length" not in names, "older names are understood, not declared"


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm"])
def test_configuration_is_of_the_protocol(catalog, name):
    config = catalog.find(name).config()
    proto = pb.ModelConfigResponse(config=config).config
    assert proto.max_batch_size == 4
    assert not proto.model_transaction_policy.decoupled
    for row, entry in zip(config["input"], proto.input, strict=True):
        assert (row["name"], row["dims"]) == (entry.name, list(entry.dims))
        assert row["optional"] == entry.optional


def test_readiness_and_index(backend, catalog):
    assert catalog.is_ready("ensemble")
    assert not catalog.is_ready("third")
    assert len(catalog.index(only_ready=True)) == 4
    backend.unready_reason = "draining"
    assert not catalog.is_ready("ensemble")
    assert catalog.index(only_ready=True) == []
    assert {row["reason"] for row in catalog.index()} == {"draining"}
