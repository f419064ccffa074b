"""What one tenant can find out of another's adapters and prompts at a real server: by errors and
listings of every route that there is, and by how much a request has to compute."""

import datetime
import json
import re
import shutil
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from safetensors.numpy import load_file, save_file

from loraplex.demo import ADAPTER_PATHS
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tenants_learn_nothing")]

NOW = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
TABLES = """
[tenants.acme]
manage = "all"
[tenants.umbrella]
manage = "all"
[tenants.ops]
operator = true
"""
NAME, ALIAS, TASK_ID = "verysecret-merger", "codename-walrus", 424242
REQUEST_ID = "acme-private-request-id"
WORDS = "the takeover of initech"
"""Words of a prompt of acme's."""
LONG = "A prompt that is long enough for whole blocks of the cache: " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def keys(folder):
    path = folder / "keys.toml"
    path.write_text(TABLES)
    return {name: create_key(path, name, NOW)[1] for name in ("acme", "umbrella", "ops")}


@pytest.fixture(scope="module")
def own_adapter(folder):
    """Write weights that no other adapter has."""
    path = folder / "weights-of-acme"
    shutil.copytree(ADAPTER_PATHS["chinese"], path)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file(
        {name: (tensor * 1.01).astype(tensor.dtype) for name, tensor in tensors.items()},
        path / "adapter_model.safetensors",
    )
    return path


@pytest.fixture(scope="module")
def server(folder, keys):
    flags = ["--api-keys-file", str(folder / "keys.toml"), "--log-level", "error"]
    flags += ["--allowed-adapter-roots", str(folder), "--iter-stats-max-iterations", "10000"]
    with serving(folder / "state", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def of(server, keys):
    """A function (tenant) -> HTTP client."""
    clients = {
        name: httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60
        )
        for name, key in keys.items()
    }
    yield clients.__getitem__
    for each in clients.values():
        each.close()


# ---------------------------------------------------------------- every route


@pytest.fixture(scope="module")
def secrets(of, own_adapter):
    """All that umbrella must never read, once acme has worked for a while."""
    acme = of("acme")
    body = {"name": NAME, "path": str(own_adapter), "task_id": TASK_ID}
    loaded = acme.post("/v1/adapters", json=body)
    assert loaded.status_code == 201, loaded.text
    digest = loaded.json()["digest"]
    assert acme.post(f"/v1/adapters/{NAME}/alias", json={"alias": ALIAS}).status_code == 200
    requested = {"model": NAME, "input": WORDS, "max_output_tokens": 4}
    response = acme.post("/v1/responses", json=requested, headers={"x-request-id": REQUEST_ID})
    assert response.status_code == 200, response.text
    refused = {"model": NAME, "prompt": WORDS, "n": 100_000}
    assert acme.post("/v1/completions", json=refused).status_code == 400
    return [
        NAME,
        ALIAS,
        str(TASK_ID),
        digest,
        own_adapter.name,
        REQUEST_ID,
        WORDS,
        response.json()["id"],
    ]


def routes(client):
    """(method, path with its parameters' names in braces), as the server documents them."""
    paths = client.get("/openapi.json").json()["paths"]
    known = {"get", "post", "put", "patch", "delete"}
    return [(method, path) for path, methods in paths.items() for method in methods.keys() & known]


def bodies(name: str):
    """What a client may send to any route, with this name wherever a name may stand."""
    yield {}
    common = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "temperature": 0,
    }
    more = {
        "input": "x",
        "inputs": "x",
        "text_input": "x",
        "path": "/nowhere",
        "alias": name,
        "temperature": 0,
    }
    for model in ("capitals", name):
        yield from (
            {**common, "model": model},
            {"prompt": "x", "max_tokens": 2, "model": model, "temperature": 0},
            {"messages": common["messages"], "max_tokens": 2, "model": model, "temperature": 0},
            {"input": "x", "model": model, "temperature": 0, "previous_response_id": name},
            {"inputs": "x", "parameters": {"adapter_id": name, "max_new_tokens": 2}},
            {"text_input": "x", "max_tokens": 2, "lora_name": name},
            {"text_input": "x", "max_tokens": 2, "lora_task_id": TASK_ID},
            {"name": name, "path": "/nowhere"},
            {"lora_name": name, "lora_path": "/nowhere"},
            {"lora_name": name},
            {"alias": name},
            {"adapters": [name], "prompt": "x", "model": model, "max_tokens": 2, "temperature": 0},
            more,
        )


def responses(client, name: str):
    """Yield (request, response) of every route, with the name in every place."""
    for method, path in routes(client):
        if path == "/openapi.json":
            continue
        places = {re.sub(r"\{\w+\}", value, path) for value in ("capitals", name)}
        for place in sorted(places):
            if method == "get" or (method == "delete" and "capitals" in place):
                yield (method, place), client.request(method, place)
                continue
            for body in bodies(name):
                yield (method, place, json.dumps(body)), client.request(method, place, json=body)


def shown(response) -> str:
    return f"{response.status_code} {dict(response.headers)} {response.text}"


def test_no_response_of_any_route_has_a_secret(of, secrets):
    num_responses = 0
    for requested, response in responses(of("umbrella"), "harmless"):
        assert response.status_code < 500 or response.status_code == 501, (requested, response.text)
        text = shown(response)
        for secret in secrets:
            if secret not in str(requested):
                assert secret not in text, (requested, secret)
        num_responses += 1
    assert num_responses > 500
    assert NAME in shown(of("acme").get("/v1/adapters")), "it was there all the time"


def test_what_another_has_looks_as_if_it_were_missing(of, secrets):
    """Try the name, the alias and the id of a stored response."""
    missing = "nobodys-thing-so"
    for secret in (NAME, ALIAS, secrets[-1]):
        known = responses(of("umbrella"), secret)
        unknown = responses(of("umbrella"), missing)
        for (requested, one), (_, other) in zip(known, unknown, strict=True):
            assert one.status_code == other.status_code, (requested, one.text, other.text)
            assert plain(one.text, secret) == plain(other.text, missing), requested


def plain(text: str, name: str) -> str:
    """Return the text without the name, numbers and ids, which differ anyway."""
    return re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "0", text.replace(name, "NAME"))


# ---------------------------------------------------------------- what is computed


def by_openai(of, tenant, prompt, model="capitals", **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    return of(tenant).post("/v1/completions", json=body)


def by_chat(of, tenant, prompt):
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "capitals", "messages": messages, "max_tokens": 2}
    return of(tenant).post("/v1/chat/completions", json=body)


def by_responses(of, tenant, prompt):
    body = {"model": "capitals", "input": prompt, "max_output_tokens": 2}
    return of(tenant).post("/v1/responses", json=body)


def by_llgtrt(of, tenant, prompt):
    grammar = {"grammars": [{"lark_grammar": "start: /a{2}/"}]}
    body = {"controller": "llguidance", "controller_arg": {"grammar": grammar}, "prompt": prompt}
    return of(tenant).post("/v1/run", json={**body, "max_tokens": 2})


def by_lorax(of, tenant, prompt):
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 2}}
    return of(tenant).post("/generate", json=body)


def by_triton(of, tenant, prompt):
    body = {"text_input": prompt, "max_tokens": 2}
    return of(tenant).post("/v2/models/ensemble/generate", json=body)


def by_adapter(of, tenant, prompt):
    return by_openai(of, tenant, prompt, "chinese")


PROTOCOLS = [by_openai, by_chat, by_responses, by_llgtrt, by_lorax, by_triton, by_adapter]


@pytest.fixture
def computed(of, server, keys) -> Callable[..., int]:
    """A function (protocol, tenant, prompt) -> prompt tokens that the engine computed for it."""

    def steps():
        return of("ops").get("/v1/iterations?limit=10000").json()

    def count(send, tenant, prompt):
        before = len(steps())
        if send == "grpc":
            by_grpc(server, keys[tenant], prompt)
        else:
            response = send(of, tenant, prompt)
            assert response.status_code == 200, response.text
        return sum(step["num_prefill_tokens"] for step in recorded_after(before))

    def recorded_after(before):
        """Return the steps of a request that has its response: records come later."""
        deadline, found = time.monotonic() + 60, []
        while True:
            time.sleep(0.2)
            earlier, found = found, steps()[before:]
            if found == earlier and sum(step["num_new_tokens"] for step in found):
                return found
            assert time.monotonic() < deadline, found

    return count


def by_grpc(server, key, prompt):
    tensors = []
    for name, kind, value in (
        ("text_input", "BYTES", np.array([[prompt.encode()]], dtype=object)),
        ("max_tokens", "INT32", np.array([[2]], dtype=np.int32)),
    ):
        tensors.append(triton_grpc.InferInput(name, list(value.shape), kind))
        tensors[-1].set_data_from_numpy(value)
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.infer("ensemble", tensors, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("send", [*PROTOCOLS, "grpc"])
def test_a_prompt_costs_the_same_if_another_tenant_sent_it_before(computed, send):
    """A prompt takes the steps, and so the time to first token, of one that was never sent."""
    tag = getattr(send, "__name__", send)
    fresh = computed(send, "umbrella", f"{tag} 1: {LONG}")
    for sender in PROTOCOLS:
        computed(sender, "acme", f"{tag} 2: {LONG}")
    assert computed(send, "umbrella", f"{tag} 2: {LONG}") == fresh
    assert computed(send, "umbrella", f"{tag} 2: {LONG}") < fresh, "its own it does have"


def test_a_salt_keeps_requests_of_one_tenant_apart(of):
    def cached(salt):
        response = by_openai(of, "acme", f"salt: {LONG}", **({"cache_salt": salt} if salt else {}))
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in ("", "one", "two")] == [0, 0, 0]
    assert all(cached(salt) > 0 for salt in ("", "one", "two"))
