import pytest
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import ConfigError, ModelNotFoundError
from loraplex.frontends.kserve.models.catalog import KINDS, Catalog
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, VLLM
from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.serving.engines.engine_state import EngineState
from support.echo_service import EchoService
from support.naming import refused


@pytest.fixture
def backend():
    return EchoService(("first", "second"))


@pytest.fixture
def catalog(backend):
    return Catalog(backend, max_batch_size=4)


def test_names(catalog):
    models = {model.name: (model.kind.name, model.card.name) for model in catalog.models()}
    assert models == {
        **{kind.name: (kind.name, "first") for kind in KINDS},
        "first": ("ensemble", "first"),
        "second": ("ensemble", "second"),
    }


def test_a_base_model_may_be_called_ensemble():
    catalog = Catalog(EchoService(("a", "ensemble")))
    assert [model.name for model in catalog.models()] == [*(kind.name for kind in KINDS), "a"]


def test_versions(catalog):
    assert catalog.find("first", "1") == catalog.find("first")
    with refused(ModelNotFoundError, "first", 2, 1, param="model"):
        catalog.find("first", "2")
    with refused(ModelNotFoundError, "third", "ensemble", "first", param="model"):
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
    config = catalog.find(name).configuration()
    proto = pb.ModelConfigResponse(config=config).config
    assert proto.max_batch_size == 4
    assert not proto.model_transaction_policy.decoupled
    for row, entry in zip(config["input"], proto.input, strict=True):
        assert (row["name"], row["dims"]) == (entry.name, list(entry.dims))
        assert row["optional"] == entry.optional


def test_readiness_and_index(backend, catalog):
    assert catalog.is_ready("ensemble")
    assert not catalog.is_ready("third")
    assert len(catalog.index(only_ready=True)) == len(KINDS) + 2
    backend.unready_reason = "it restarts"
    assert not catalog.is_ready("ensemble")
    assert catalog.index(only_ready=True) == []
    for row in catalog.index():
        base = "second" if row["name"] == "second" else "first"
        assert row["reason"] == f"the engine of model {base!r} is restarting: it restarts"


def test_each_model_has_its_own_state_and_reason(backend, catalog):
    first, second = (backend.model(name) for name in ("first", "second"))
    second.engine.state, second.engine.failure = EngineState.FAILED, ConfigError("no weights")
    rows = {row.pop("name"): row for row in catalog.index()}
    reason = "the engine of model 'second' is failed: no weights"
    unavailable = {"version": "1", "state": "UNAVAILABLE", "reason": reason}
    assert rows.pop("second") == unavailable
    assert all(row == {"version": "1", "state": "READY", "reason": ""} for row in rows.values())
    assert [row["name"] for row in catalog.index(only_ready=True)] == list(rows)
    first.engine.state = EngineState.RESTARTING
    assert (
        "'second'" not in next(row for row in catalog.index() if row["name"] == "first")["reason"]
    )
    backend.draining.begin()
    assert {row["reason"] for row in catalog.index()} == {backend.health().reason}


# ---------------------------------------------------------------- of a model repository


def test_a_repository_says_what_there_is(backend):
    declarations = [
        ModelDeclaration(name="text", kind=ENSEMBLE, base_model="second", max_batch_size=8),
        ModelDeclaration(
            name="v", kind=VLLM, base_model="first", version="3", is_decoupled=True
        ),
    ]  # fmt: skip
    catalog = Catalog(backend, declarations=declarations)
    assert {m.name: m.card.name for m in catalog.models()} == {"text": "second", "v": "first"}
    with refused(ModelNotFoundError, "text", "v", "ensemble", param="model"):
        catalog.find("ensemble")
    assert catalog.find("v", "3").version == "3"
    with refused(ModelNotFoundError, "v", 1, 3, param="model"):
        catalog.find("v", "1")
    assert [(row["name"], row["version"]) for row in catalog.index()] == [("text", "1"), ("v", "3")]


def test_shapes_without_a_batch(backend):
    declaration = ModelDeclaration(name="v", kind=VLLM, base_model="first", version="3")
    metadata = Catalog(backend, declarations=[declaration]).find("v").metadata()
    assert metadata["versions"] == ["3"]
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}


def test_a_declared_configuration_is_what_clients_see(backend):
    row = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    config = {"platform": "ensemble", "backend": "", "input": [row], "output": []}
    declaration = ModelDeclaration(
        name="text", kind=ENSEMBLE, base_model="first", max_batch_size=8, config=config
    )
    model = Catalog(backend, declarations=[declaration]).find("text")
    assert model.configuration() == config
    metadata = model.metadata()
    assert metadata["platform"] == "ensemble"
    assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}]
    assert metadata["outputs"] == []


def test_models_are_made_once(catalog):
    assert catalog.find("first") is catalog.find("first")


def test_what_the_backend_has_is_seen_at_once(backend, catalog):
    assert [model.name for model in catalog.models()][-1] == "second"
    cards = backend.models()
    backend.models = lambda principal=None: cards[:1]
    assert [model.name for model in catalog.models()][-1] == "first"
    with refused(ModelNotFoundError, "second", "first", param="model"):
        catalog.find("second")


async def test_the_model_of_token_ids_is_the_loaded_one_of_the_same_base_model(backend):
    catalog = Catalog(backend, control=ModelControl(ControlMode.EXPLICIT))
    first, second = catalog.find("first"), catalog.find("second")
    assert catalog.token_model(first) is catalog.find("tensorrt_llm")
    assert catalog.token_model(second) is None
    catalog.unload("tensorrt_llm")
    assert catalog.token_model(first) is None
    await catalog.load("tensorrt_llm", {})
    assert catalog.token_model(first) is catalog.find("tensorrt_llm")
