"""Compare the app with its OpenAPI document: schemathesis sends valid and invalid requests."""

import atexit
import json
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from loraplex.adapters.uploads import UploadLimits, Uploads
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    CapacityError,
    InternalError,
    RequestError,
    UnauthenticatedError,
    leaves,
)
from loraplex.core.principal import LOCAL
from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl
from loraplex.serving.model_memory import DeviceTier, HostTier, KVMemory, ModelMemory
from support.described_app import described_app
from support.echo_service import EchoService
from support.examples import num_examples

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
NUM_CASES = num_examples(20)
EVENTS = "text/event-stream"
NOT_SERVED = 501
"""Triton's own status for what a server does not have."""


def backend() -> EchoService:
    """Return a backend with two adapters and a known memory layout."""
    made = EchoService()
    for name in ("0", "org/name"):
        made.register(name)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    limits = UploadLimits(
        max_bytes=1 << 20, max_tenant_bytes=1 << 20, max_uploads=4, max_seconds=60
    )
    made.uploads = Uploads(Path(folder) / "uploads", limits, SystemClock())
    made.model_memory = ModelMemory(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        weights_bytes=1,
        kv=KVMemory(num_bytes=1, block_tokens=16, blocks=1, tokens=16),
        device=DeviceTier(num_bytes=1, page_bytes=1, pages=1),
        host=HostTier(num_bytes=1),
    )
    return made


def by_one_key(headers):
    if headers.get("authorization") != f"Bearer {KEY}":
        raise UnauthenticatedError("another key")
    return LOCAL


def described(*, with_key: bool):
    """The document of a server, as schemathesis reads it, bound to the server."""
    control = ModelControl(ControlMode.EXPLICIT)
    app = described_app(backend(), *([by_one_key] if with_key else []), control=control)
    headers = {"authorization": f"Bearer {KEY}"} if with_key else {}
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)


OPEN, LOCKED = described(with_key=False), described(with_key=True)
LABELS = sorted(each.ok().label for each in OPEN.get_all_operations())


def operation_of(schema, label):
    return next(op for each in schema.get_all_operations() if (op := each.ok()).label == label)


# ------------------------------------------------------------------ what must be so


def no_crash(ctx, response, case):
    """5xx is what the server could not do; here it can do all but what Triton's 501 is for."""
    allowed = response.status_code == NOT_SERVED and case.operation.path.startswith("/v2/")
    assert response.status_code < 500 or allowed, response.text


def events_as_documented(ctx, response, case):
    """Check the data of every event against the document."""
    kind = response.headers.get("content-type", [""])[0].partition(";")[0]
    if kind != EVENTS:
        return
    documented = case.operation.definition.raw["responses"][str(response.status_code)]
    schema = documented["content"][EVENTS]["schema"]["properties"]["data"]
    schema = schema.get("anyOf", [schema])[0]["contentSchema"]
    for line in response.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            check(schema, json.loads(line.removeprefix("data: ")), case)


def no_undocumented_field(ctx, response, case):
    """Check that the document has every field of the response, with its objects closed."""
    documented = case.operation.definition.raw["responses"].get(str(response.status_code), {})
    media = documented.get("content", {}).get("application/json")
    kind = response.headers.get("content-type", [""])[0]
    if media and kind == "application/json" and response.text:
        check(media["schema"], response.json(), case)


CHECKS = [
    *(status_code_conformance, content_type_conformance, response_headers_conformance),
    *(response_schema_conformance, negative_data_rejection, missing_required_header),
    *(unsupported_method, allow_header_conformance, ignored_auth),
    *(no_crash, events_as_documented, no_undocumented_field),
]


VALIDATORS = {}
"""Validators by document and schema: to close a document takes longer than the rest of a test."""


def check(schema, value, case):
    components = case.operation.schema.raw_schema["components"]
    key = id(components), json.dumps(schema)
    if key not in VALIDATORS:
        document = {**closed(schema), "components": closed(components)}
        # With the components: nothing else has their id as long as they are kept.
        VALIDATORS[key] = components, jsonschema_rs.Draft202012Validator(document)
    validator = VALIDATORS[key][1]
    assert validator.is_valid(value), next(iter(validator.iter_errors(value)))


FREE = {"TritonGenerateResult", "ModelConfig"}
"""Objects whose other members are the model's."""


def closed(schema):
    """Return the schema with objects restricted to the members that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    has_names = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if has_names and schema.get("title") not in FREE:
        made.setdefault("additionalProperties", False)
    return made


# ------------------------------------------------------------------ requests


COUNTING = "POST /v1/responses/input_tokens"
"""A route that generates nothing, and so ignores the generation parameters."""


def send(case, statuses):
    is_right = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_right and statuses.total() % 2:
        made_sensible(case)
    response = case.call()
    checks = [each for each in CHECKS if each is not negative_data_rejection]
    is_counting = case.operation.label == COUNTING
    case.validate_response(response, checks=checks if is_counting else CHECKS)
    statuses[response.status_code] += 1


SENSIBLE = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "inputs": "hi",
    "adapters": [None, "0"],
    "max_tokens": 3,
    "model": "echo",
}


def made_sensible(case):
    """Keep at most two optional fields: of eighty random ones, two always contradict each other."""
    if not isinstance(case.body, dict):
        return
    chance = random.Random(repr(case.body))
    fields = dict(chance.sample(sorted(case.body.items()), k=min(2, len(case.body))))
    if "messages" in case.body and "prompt" in case.body:
        case.body.pop(chance.choice(["messages", "prompt"]))
    must = {name: SENSIBLE[name] for name in case.body if name in SENSIBLE and name != "model"}
    case.body = {**fields, **must, **({"stream": True} if "stream" in fields else {})}


def at_random(operation, num_cases, statuses):
    """Half of them right, of which every other one is simple; half of them wrong."""
    for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:

        @seed(0)
        @settings(
            max_examples=max(1, num_cases // 2),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def test(case):
            send(case, statuses)

        try:
            test()
        except Unsatisfiable:
            # There is nothing in such a request that could be wrong.
            assert mode is GenerationMode.NEGATIVE


def systematically(operation, statuses):
    """Values at and beyond their borders, absent and unknown fields, other methods."""
    schema = operation.schema
    cases = schema.iter_coverage_cases(
        operation,
        generation_modes=list(GenerationMode),
        generation_config=schema.config.generation_for(operation=operation),
    )
    for case in cases:
        send(case, statuses)


ERRORS = {*leaves(RequestError), *leaves(CapacityError), *leaves(InternalError)}
PLANTED = sorted(ERRORS - {UnauthenticatedError}, key=lambda error: error.code)
BODIES = {
    "POST /v1/completions": {"prompt": "a"},
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "POST /v1/embeddings": {"input": "a"},
    "POST /classify": {"input": "a"},
    "POST /v2/embed": {"texts": ["a"]},
    "POST /embed": {"inputs": "a"},
    "POST /pooling": {"input": "a"},
    "POST /score": {"query": "a", "items": "b", "label_token_ids": [1]},
    "POST /v1/responses": {"input": "a"},
    "POST /generate": {"inputs": "a"},
    "POST /v2/models/{model}/generate": {"text_input": "a", "max_tokens": 1},
}


@pytest.mark.parametrize("label", BODIES)
@pytest.mark.parametrize("error", PLANTED, ids=lambda error: error.__name__)
def test_every_error_that_generation_can_raise_is_documented(label, error):
    """Plant each engine error in the backend, because no request can provoke it."""
    made = EchoService()
    app = described_app(made)
    operation = operation_of(schemathesis.openapi.from_dict(OPEN.raw_schema), label)
    made.plant(error("planted", retry_after_seconds=1))
    case = operation.Case(
        body=BODIES[label], media_type="application/json", path_parameters={"model": "ensemble"}
    )
    response = case.call(app=app)
    case.validate_response(
        response, checks=[status_code_conformance, content_type_conformance, no_undocumented_field]
    )
    assert b"planted" in response.content


def bodies():
    """Return the routes by the body that their requests have, without those that have none."""
    by_body = defaultdict(list)
    for label in LABELS:
        body = operation_of(OPEN, label).definition.raw.get("requestBody")
        if body is not None:
            by_body[json.dumps(body["content"], sort_keys=True)].append(label)
    return by_body.values()


REPEATED = [label for routes in bodies() for label in routes[1:]]
"""Routes with the body of another route, which read it alike."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", LABELS)
def test_generated_requests(label):
    statuses = Counter()
    at_random(operation_of(OPEN, label), NUM_CASES // len(LABELS), statuses)
    if label not in REPEATED:
        systematically(operation_of(OPEN, label), statuses)
    print(label, statuses.total(), dict(statuses))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", REPEATED)
def test_systematic_requests_of_the_other_routes(label):
    systematically(operation_of(OPEN, label), Counter())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", LABELS)
def test_generated_requests_to_a_server_with_keys(label):
    """Few: the requests are those of the server without keys, and each is sent without its key."""
    statuses = Counter()
    at_random(operation_of(LOCKED, label), num_examples(1 / 15), statuses)
    print(label, statuses.total(), dict(statuses))
