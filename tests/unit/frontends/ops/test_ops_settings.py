"""GET /v1/settings: values, sources and secrets."""

import json

import httpx
import pytest

from loraplex.core.config import SETTINGS, AdapterConfig, Config, ModelConfig
from loraplex.core.config_layers import Layer, field_layers, resolve
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import by_api_key
from loraplex.frontends.ops.settings import MAX_ITEMS, setting_list, with_found_sizes
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from loraplex.serving.model_memory import DeviceTier, HostTier, KVMemory, ModelMemory
from support.described_app import described_app
from support.echo_service import EchoService
from support.naming import naming


def server(config):
    return {entry.name: entry for entry in setting_list(config).server}


def model(config, name="m"):
    return {entry.name: entry for entry in setting_list(config).models[name]}


def test_each_value_has_its_source():
    file = {"server": {"http_port": 1, "grpc_port": 2}, "models": {"m": {"path": "/m"}}}
    config = resolve(
        [
            Layer("settings.toml", file),
            *field_layers("environment variable LORAPLEX_{variable}", {"grpc_port": "3"}, ["m"]),
            *field_layers("flag --{flag}", {"max_num_seqs": 7}, ["m"]),
            Layer("a", {"models": {"m": {"adapters": {"x": {"path": "/x"}}}}}),
            Layer("b", {"models": {"m": {"adapters": {"y": {"path": "/y", "task_id": 3}}}}}),
        ]
    )
    shown = server(config)
    assert (shown["http_port"].value, shown["http_port"].source) == (1, "settings.toml")
    grpc_port = shown["grpc_port"]
    assert (grpc_port.value, grpc_port.source) == (3, "environment variable LORAPLEX_GRPC_PORT")
    assert (shown["host"].source, shown["host"].default) == ("default", "127.0.0.1")
    one = model(config)
    assert (one["path"].value, one["path"].source) == ("/m", "settings.toml")
    assert one["max_num_seqs"].source == "flag --max-num-seqs"
    assert one["adapters"].source == "a, b"
    assert one["adapters"].value["y"]["task_id"] == 3
    assert {entry.name for entry in setting_list(config).server} == {*shown}


def test_a_source_of_settings_is_not_set_by_one():
    with pytest.raises(Exception, match=naming("f", "sources", "server", "models")):
        resolve([Layer("f", {"sources": {"server": {"http_port": "me"}}})])


def test_what_the_server_derives():
    config = Config(server=ServerConfig(http_port=9))
    assert server(config)["http_port"].source == "derived"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa:ss@host:80/x?token=1", "https://***@host:80/x?***"),
        ("https://token@host", "https://***@host"),
        ("s3://bucket/name@v1", "s3://bucket/name@v1"),
        ("hf://org/model", "hf://org/model"),
        ("/a/folder?x@y", "/a/folder?x@y"),
        ("http://host/?X-Amz-Signature=abc", "http://host/?***"),
    ],
)
def test_addresses_are_shown_without_secrets(text, shown):
    adapters = {"x": AdapterConfig(path=text)}
    config = Config(models={"m": ModelConfig(path=text, adapters=adapters)})
    assert model(config)["path"].value == shown
    assert model(config)["adapters"].value["x"]["path"] == shown


def test_no_setting_is_a_secret():
    """Keys, tokens and passwords are in files and variables that are not settings."""
    words = ("key", "token", "password", "secret")
    texts = {
        name
        for name, field in SETTINGS.items()
        if field.kind is str and any(word in name for word in words)
    }
    assert texts == {"api_keys_file", "tls_key", "tokenizer", "json_start_token"}


def test_long_tables_are_cut():
    adapters = {str(number): AdapterConfig(path="/x") for number in range(1000)}
    entry = model(Config(models={"m": ModelConfig(path="/m", adapters=adapters)}))["adapters"]
    assert (len(entry.value), entry.num_items) == (MAX_ITEMS, 1000)


async def test_operators_only():
    operator, tenant = new_key(), new_key()
    authenticate = by_api_key(ApiKeys(None, f"{operator} acme:{tenant}"))
    app = described_app(EchoService(), authenticate)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        for key, status in ((tenant, 403), (operator, 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.get("/v1/settings", headers=headers)
            assert response.status_code == status
        names = [entry["name"] for entry in json.loads(response.content)["server"]]
        assert "http_port" in names


def test_sizes_that_the_engine_found_are_shown():
    backend = EchoService()
    backend.model_memory = ModelMemory(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        weights_bytes=1,
        kv=KVMemory(num_bytes=100, block_tokens=16, blocks=1, tokens=16),
        device=DeviceTier(num_bytes=200, page_bytes=1, pages=1),
        host=HostTier(num_bytes=1),
    )
    name = backend.models()[0].name
    given = ModelConfig(path="/m", kv_cache_bytes=7)
    found = with_found_sizes(backend, name, given)
    shown = model(Config(models={name: found}), name)
    assert (shown["max_num_seqs"].value, shown["max_num_seqs"].source) == (64, "derived")
    assert shown["max_num_batched_tokens"].value == 512
    assert shown["lora_device_bytes"].value == 200
    assert shown["kv_cache_bytes"].value == 7
    assert shown["memory_bytes"].value is None
    assert shown["max_model_len"].value == backend.models()[0].max_model_len


def test_before_the_engine_was_there_its_sizes_are_open():
    backend = EchoService()
    backend.forget_engines()
    given = ModelConfig(path="/m")
    assert with_found_sizes(backend, backend.models()[0].name, given) == given
    assert with_found_sizes(backend, "unloaded", given) == given
