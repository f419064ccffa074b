"""Settings from their layers to one value, and what is said about a wrong one."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from loraplex.core.byte_sizes import parse_bytes
from loraplex.core.config import AdapterConfig, Config, ModelConfig
from loraplex.core.config_layers import Layer, field_layers, file_layer, resolve
from loraplex.core.environment import (
    child_environment,
    environment_fields,
    leave_grpc_out_of_forks,
    let_threads_sleep,
    state_directory,
)
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from support.naming import naming

FLAG = "flag --{flag}"
VARIABLE = "variable LORAPLEX_{variable}"


def layers(file: dict, environment: dict, flags: dict, names=("m",)) -> list[Layer]:
    return [
        Layer("settings.toml", file),
        *field_layers(VARIABLE, environment, names),
        *field_layers(FLAG, flags, names),
    ]


def model(**fields) -> dict:
    return {"models": {"m": {"path": "/m", **fields}}}


def error_of(*given: Layer) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults():
    config = resolve([Layer("f", model())])
    assert config.models == {"m": ModelConfig(path="/m")}
    assert config.server == ServerConfig()
    assert resolve([]) == Config()


@pytest.mark.parametrize(
    ("file", "environment", "flags", "expected"),
    [
        ({}, {}, {}, ServerConfig().http_port),
        ({"server": {"http_port": 1}}, {}, {}, 1),
        ({"server": {"http_port": 1}}, {"http_port": "2"}, {}, 2),
        ({"server": {"http_port": 1}}, {"http_port": "2"}, {"http_port": 3}, 3),
        ({"server": {"http_port": 1}}, {}, {"http_port": 3}, 3),
        ({}, {"http_port": "2"}, {}, 2),
    ],
)
def test_precedence(file, environment, flags, expected):
    assert resolve(layers(file, environment, flags)).server.http_port == expected


def test_a_flag_holds_for_every_model():
    file = {"models": {"a": {"path": "/a", "block_size": 8}, "b": {"path": "/b"}}}
    given = layers(file, {"dtype": "float16"}, {"max_num_seqs": 7}, ("a", "b"))
    models = resolve(given).models
    assert [m.max_num_seqs for m in models.values()] == [7, 7]
    assert [m.dtype for m in models.values()] == ["float16", "float16"]
    assert [m.block_size for m in models.values()] == [8, 16]


def test_tables_are_merged_and_lists_are_replaced():
    first = Layer("f", model(adapters={"a": {"path": "/a", "task_id": 1}}, adapter_dirs=["/x"]))
    second = Layer("g", model(adapters={"b": {"path": "/b"}}, adapter_dirs=["/y", "/z"]))
    config = resolve([first, second]).models["m"]
    assert config.adapters == {"a": AdapterConfig("/a", 1), "b": AdapterConfig("/b")}
    assert config.adapter_dirs == ("/y", "/z")


def test_an_empty_table_takes_nothing_away():
    first = Layer("f", model(adapters={"a": {"path": "/a"}}))
    second = Layer("g", {"models": {"m": {"adapters": {}}}, "server": {}})
    assert set(resolve([first, second]).models["m"].adapters) == {"a"}


def test_layers_are_left_as_they_are():
    values = {"models": {}, "server": {}}
    resolve([Layer("f", values), *field_layers(FLAG, {"http_port": 1}, ["m"])])
    assert values == {"models": {}, "server": {}}


def test_text_from_the_environment_becomes_what_the_setting_is():
    environment = {
        "shutdown_seconds": "1.5",
        "enable_prefix_cache": "false",
        "max_model_len": "null",
        "kv_cache_bytes": "2GiB",
    }
    config = resolve(layers(model(max_model_len=5), environment, {}))
    assert config.server.shutdown_seconds == 1.5
    assert config.models["m"].enable_prefix_cache is False
    assert config.models["m"].max_model_len is None
    assert config.models["m"].kv_cache_bytes == 2 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("1MiB", 1 << 20),
        ("1 mib", 1 << 20),
        ("1.5 GB", 1_500_000_000),
        ("1.5g", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("3k", 3000),
        ("7b", 7),
        ("9007199254740993", 9007199254740993),  # a float could not hold it
        ("0.1KB", 100),
    ],
)
def test_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "1ib", "1 PB", "1e9", "1.GB", "0x10", "1 2"])
def test_not_bytes(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)
    message = error_of(*layers(model(), {"lora_host_bytes": text}, {}))
    assert message.startswith("variable LORAPLEX_LORA_HOST_BYTES: models.m.lora_host_bytes: ")


WRONG = [
    ({"http_port": 65536}, (0, 65535, 65536)),
    ({"grpc_port": -1}, (0, 65535, -1)),
    ({"otlp_endpoint": "collector:4318"}, ("http://host:4318", "'collector:4318'")),
    ({"max_connections": 0}, (1, 0)),
    ({"header_timeout_seconds": 0}, (0.001, 0.0)),
    ({"metrics_port": "http"}, ("int", "str")),
    ({"log_level": "loud"}, ("debug", "info", "warning", "error", "'loud'")),
    ({"cors_origins": ["foo", "bar"]}, ("*", "foo, bar")),
    ({"max_body_bytes": 0}, (1, 0)),
    ({"shutdown_seconds": -0.1}, (0, -0.1)),
    ({"shutdown_seconds": float("nan")}, (0, "nan")),
    ({"shutdown_seconds": float("inf")}, (2**63 - 1, "inf")),
    ({"dtype": "float8"}, ("auto", "float32", "float16", "bfloat16", "'float8'")),
    ({"device": "tpu"}, ("cpu", "cuda", "cuda:N", "'tpu'")),
    ({"device": "cuda:x"}, ("cpu", "cuda", "cuda:N", "'cuda:x'")),
    ({"max_model_len": 0}, (1, 0)),
    ({"max_num_seqs": 0}, (1, 0)),
    ({"max_num_seqs": 2**63}, (2**63 - 1, 2**63)),
    ({"max_num_seqs": True}, ("int", "bool")),
    ({"max_num_batched_tokens": 0}, (1, 0)),
    ({"block_size": 0}, (1, 0)),
    ({"kv_cache_bytes": 0}, (1, 0)),
    ({"max_queue_size": -1}, (0, -1)),
    ({"max_queue_delay_microseconds": -1}, (0, -1)),
    ({"max_lora_rank": 0}, (1, 0)),
    ({"lora_device_bytes": 0}, (1, 0)),
    ({"lora_host_bytes": 0}, (1, 0)),
    ({"num_threads": 0}, (1, 0)),
    ({"enable_prefix_cache": "maybe"}, ("bool", "str")),
]


@pytest.mark.parametrize(("flags", "named"), WRONG, ids=str)
def test_a_wrong_value_names_itself_and_its_source(flags, named):
    (field,) = flags
    message = error_of(*layers(model(), {}, flags))
    assert message.startswith(f"flag --{field.replace('_', '-')}: ")
    assert field in message
    assert re.search(naming(*named), message)


def test_the_source_is_the_layer_that_won():
    file = model(block_size=-5)
    assert error_of(*layers(file, {}, {})).startswith("settings.toml: models.m.block_size: ")
    assert error_of(*layers(file, {"block_size": "-6"}, {})).startswith("variable LORAPLEX_BLOCK")
    assert "got -7" in error_of(*layers(file, {"block_size": "-6"}, {"block_size": -7}))
    assert resolve(layers(file, {}, {"block_size": 8})).models["m"].block_size == 8


def test_of_several_models_the_right_one_is_named():
    """Keys of a dictionary are lost in the messages of msgspec."""
    good = Layer("good.toml", {"models": {"a": {"path": "/a"}}})
    wrong = Layer("wrong.toml", {"models": {"b": {"path": "/b", "dtype": 8}}})
    assert error_of(good, wrong).startswith("wrong.toml: models.b.dtype: Expected `str`")
    pathless = Layer("wrong.toml", {"models": {"b": {"block_size": 8}}})
    message = error_of(good, pathless)
    assert message.startswith("wrong.toml: models.b: ")
    assert "`path`" in message
    adapters = {"x": {"path": "/x"}, "y": {"path": "/y", "task_id": "seven"}}
    assert error_of(good, Layer("wrong.toml", {"models": {"a": {"adapters": adapters}}})) == (
        "wrong.toml: models.a.adapters.y.task_id: Expected `int | null`, got `str`"
    )


def test_a_model_without_anything_is_not_forgotten():
    assert error_of(Layer("f.toml", {"models": {"a": {}}})).startswith("f.toml: models.a: ")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"sever": {}}, "sever"),
        ({"server": {"port": 1}}, "server.port"),
        ({"models": {"m": {"path": "/m", "max_seqs": 1}}}, "models.m.max_seqs"),
        (
            {"models": {"m": {"path": "/m", "adapters": {"a": {"pth": 1}}}}},
            "models.m.adapters.a.pth",
        ),
    ],
)
def test_unknown_keys_are_errors_that_name_the_known_ones(values, where):
    message = error_of(Layer("f.toml", values))
    assert re.match(rf"f\.toml: {where}: unknown setting(; did you mean \w+\?)?; known: ", message)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"server": 3}, "server"),
        ({"models": ["m"]}, "models"),
        ({"models": {"m": "/m"}}, "models.m"),
        ({"models": {"m": {"path": "/m", "adapters": "zh"}}}, "models.m.adapters"),
        ({"models": {"m": {"path": "/m", "adapters": {"zh": "/zh"}}}}, "models.m.adapters.zh"),
    ],
)
def test_what_is_no_table_is_an_error_even_under_flags(values, where):
    flags = field_layers(FLAG, {"http_port": 1, "block_size": 8}, ["m"])
    adapter = Layer("flag --adapter", {"models": {"m": {"adapters": {"zh": {"path": "/zh"}}}}})
    message = error_of(Layer("f.toml", values), *flags, adapter)
    assert re.search(naming("f.toml", where), message)


def test_a_later_layer_that_breaks_a_table_is_named():
    message = error_of(Layer("f.toml", model()), Layer("g.toml", {"models": 3}))
    assert re.search(naming("g.toml", "models", 3), message)


def test_names_that_are_no_settings():
    similar = r"variable LORAPLEX_HTP_PORT is not a setting of loraplex; did you mean http_port\?$"
    with pytest.raises(ConfigError, match=similar):
        field_layers(VARIABLE, {"htp_port": "1"}, ["m"])
    for field in ("path", "adapters", "adapter_dirs"):
        with pytest.raises(ConfigError, match=naming("models.NAME")):
            field_layers(VARIABLE, {field: "x"}, ["m"])


def test_variables_of_kubernetes_services_are_no_settings():
    links = {
        "LORAPLEX_SERVICE_HOST": "10.0.0.1",
        "LORAPLEX_SERVICE_PORT": "8000",
        "LORAPLEX_SERVICE_PORT_HTTP": "8000",
        "LORAPLEX_PORT": "tcp://10.0.0.1:8000",
        "LORAPLEX_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "LORAPLEX_PORT_8000_TCP_PROTO": "tcp",
        "LORAPLEX_HEADLESS_SERVICE_HOST": "10.0.0.2",
        "LORAPLEX_HTTP_PORT": "tcp://10.0.0.2:80",
    }
    settings = {"LORAPLEX_HTTP_PORT": "8000", "LORAPLEX_PORT": "8000", "LORAPLEX_HOST": "::"}
    assert environment_fields(links) == {}
    assert environment_fields(settings) == {"http_port": "8000", "port": "8000", "host": "::"}


def test_the_environment_by_field_name(monkeypatch):
    assert environment_fields({"LORAPLEX_HTTP_PORT": "1", "PATH": "x", "loraplex_x": "y"}) == {
        "http_port": "1"
    }
    monkeypatch.setenv("LORAPLEX_HOST", "::1")
    assert environment_fields()["host"] == "::1"


def test_a_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[server]\nhttp_port = 1\n[models.m]\npath = "/m"\n[models.n]\npath = "/n"\n')
    layer = file_layer(path)
    assert layer.model_names == ["m", "n"]
    config = resolve([layer])
    assert (config.server.http_port, config.models["n"].path) == (1, "/n")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=naming("no.toml")):
        file_layer(tmp_path / "no.toml")
    path = tmp_path / "bad.toml"
    path.write_text("[server\n")
    with pytest.raises(ConfigError, match=naming("bad.toml", "TOML")):
        file_layer(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=naming("bad.toml", "TOML")):
        file_layer(path)


def test_model_names_of_something_else():
    assert Layer("f", {"models": 3}).model_names == []
    assert Layer("f", {}).model_names == []


def test_a_model_config_crosses_a_process():
    config = resolve([Layer("f", model(adapters={"a": {"path": "/a"}}, adapter_dirs=["/x"]))])
    wire = msgspec.msgpack.encode(config.models["m"])
    assert msgspec.msgpack.decode(wire, type=ModelConfig) == config.models["m"]


def test_state_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_directory("") == Path("/state/loraplex")
    assert state_directory("~/x") == Path("/home/me/x")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_directory("") == Path("/home/me/.local/state/loraplex")


def test_settings_do_not_reach_child_processes_by_variables(monkeypatch):
    monkeypatch.setenv("LORAPLEX_HTTP_PORT", "1")
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    environment = child_environment()
    assert "LORAPLEX_HTTP_PORT" not in environment
    assert environment["OTHER"] == "kept"
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"  # the operator decided
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert child_environment()["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("prepare", "name", "ours", "operators"),
    [
        (let_threads_sleep, "OMP_WAIT_POLICY", "PASSIVE", "ACTIVE"),
        (leave_grpc_out_of_forks, "GRPC_ENABLE_FORK_SUPPORT", "false", "true"),
    ],
)
def test_our_variables_for_libraries_give_way_to_the_operators(
    monkeypatch, prepare, name, ours, operators
):
    monkeypatch.setenv(name, operators)
    prepare()
    assert os.environ[name] == operators
    monkeypatch.delenv(name)
    prepare()
    assert os.environ[name] == ours


@pytest.mark.parametrize(
    ("alias", "field", "value"),
    [
        ("memory", "memory_bytes", 1 << 30),
        ("kv_cache_free_gpu_mem_fraction", "kv_cache_fraction", 0.5),
        ("lora_cache_max_adapter_size", "max_lora_rank", 32),
        ("lora_cache_optimal_adapter_size", "optimal_lora_rank", 16),
        ("lora_cache_gpu_memory_fraction", "lora_device_fraction", 0.1),
        ("lora_cache_host_memory_bytes", "lora_host_bytes", 1 << 30),
    ],
)
def test_other_names_of_a_setting(alias, field, value):
    in_file = resolve([Layer("f", model(**{alias: value}))])
    assert getattr(in_file.models["m"], field) == value
    given = layers({"models": {"m": {"path": "/m", field: 7}}}, {}, {alias: value}, ("m",))
    assert getattr(resolve(given).models["m"], field) == value
    text = resolve([Layer("f", model()), *field_layers(FLAG, {alias: str(value)}, ["m"])])
    assert getattr(text.models["m"], field) == value


def test_bytes_have_units_under_another_name_too():
    assert resolve([Layer("f", model(memory="2GiB"))]).models["m"].memory_bytes == 2 << 30


def test_one_setting_under_two_names_in_one_place():
    with pytest.raises(ConfigError, match=naming("models.m.memory", "memory_bytes")):
        resolve([Layer("f", model(memory_bytes=1, memory=2))])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_a_fraction_is_a_share(fraction):
    with pytest.raises(ConfigError, match=naming(0, 1, "models.m.kv_cache_fraction")):
        resolve([Layer("f", model(kv_cache_fraction=fraction))])


@pytest.mark.parametrize("seconds", [0, 0.5, float("inf"), float("nan")])
def test_a_ttl_is_a_second_at_least(seconds):
    with pytest.raises(ConfigError, match="lora_ttl_seconds"):
        resolve([Layer("f", model(lora_ttl_seconds=seconds))])


def test_a_list_in_a_variable_has_commas():
    layers = field_layers(
        "variable {variable}", {"allowed_adapter_hosts": "huggingface.co, s3://ours,"}, []
    )
    assert resolve(layers).server.allowed_adapter_hosts == ("huggingface.co", "s3://ours")


def test_settings_of_a_gpu():
    config = resolve(layers(model(device="cuda"), {}, {})).models["m"]
    assert (config.cuda_graphs, config.cuda_graph_batch_sizes) == (True, ())
    assert (config.batch_invariant, config.attention_backend) == (False, "auto")
    assert config.overlap is None
    text = {
        "cuda_graph_mode": "false",
        "cudagraph_capture_sizes": "1, 8,32",
        "batch_invariant": "true",
        "attention_backend": "triton",
        "overlap": "false",
    }
    config = resolve(layers(model(), text, {})).models["m"]
    assert (config.cuda_graphs, config.cuda_graph_batch_sizes) == (False, (1, 8, 32))
    assert (config.batch_invariant, config.attention_backend) == (True, "triton")
    assert config.overlap is False
    one = resolve(layers(model(cuda_graph_batch_sizes=4, use_cuda_graph=True), {}, {}))
    assert one.models["m"].cuda_graph_batch_sizes == (4,)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("cuda_graph_batch_sizes", (1, 257), (1, 256, 257)),
        ("cuda_graph_batch_sizes", (0,), (1, 256, 0)),
        ("attention_backend", "fa3", ("auto", "triton", "flashinfer", "fa3")),
    ],
)
def test_wrong_settings_of_a_gpu(field, value, named):
    assert re.search(naming(*named), error_of(*layers(model(**{field: value}), {}, {})))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("rank_first",), ("rank_major", "grouped_by_expert", "rank_first")),
        (("swapped", "rank_major", "unswapped"), ("unswapped", "swapped", "rank_major")),
    ],
)
def test_wrong_layouts_of_experts(words, named):
    assert re.search(naming(*named), error_of(*layers(model(expert_lora_layout=words), {}, {})))


def test_the_words_of_tensorrt_llm():
    values = {
        "gpt_model_type": "V1",
        "enable_trt_overlap": True,
        "enable_kv_cache_reuse": False,
        "batch_scheduler_policy": "guaranteed_no_evict",
    }
    config = resolve(layers(model(**values), {}, {})).models["m"]
    assert (config.batching, config.overlap, config.enable_prefix_cache) == ("static", True, False)
    config = resolve(layers(model(), {"gpt_model_type": "inflight_fused_batching"}, {}))
    assert config.models["m"].batching == "inflight"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("batching", "V2", ("inflight", "static", "inflight_fused_batching", "V2")),
        ("fair_share", "user", ("none", "adapter", "tenant", "tenant_adapter", "user")),
        ("fair_weights", {"a": 0.0}, ("a", 0.001, 1000, 0.0)),
        ("fair_weights", {"a": 1, "b": 1e-200}, ("b", 0.001, 1000, "1e-200")),
        ("fair_weights", {"a": 1e4}, ("a", 0.001, 1000)),
        (
            "batch_scheduler_policy",
            "x",
            ("max_utilization", "guaranteed_no_evict", "settings.toml"),
        ),
        ("shortest_prefill_share", 1.0, (0, 1, 1.0)),
        ("num_draft_tokens", 65, (64, 65, "settings.toml")),
        ("max_prefill_chunk", 0, (1, 0, "settings.toml")),
        ("enable_chunked_context", False, ("settings.toml", "models.m.enable_chunked_context")),
    ],
)
def test_wrong_settings_of_the_scheduler(field, value, named):
    assert re.search(naming(*named), error_of(*layers(model(**{field: value}), {}, {})))


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("quantization", "awq", "is served as it is, so leave the setting out"),
        ("quantization", "AWQ", "is served as it is, so leave the setting out"),
        ("quantization", "w4a16", "use int4"),
        ("kv_dtype", "fp8", "use int8"),
    ],
)
def test_values_of_other_systems_have_advice(setting, value, advice):
    with pytest.raises(ConfigError) as error:
        resolve([Layer("file", {"models": {"base": {"path": "/m", setting: value}}})])
    assert advice in error.value.message
    assert f"got {value!r}" in error.value.message
