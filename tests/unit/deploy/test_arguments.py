from pathlib import Path
from typing import Any

import pytest

from loraplex.core.devices import Device
from loraplex.core.errors import ConfigError
from loraplex.deploy.arguments import read_arguments
from support.naming import naming


def test_texts_of_the_command_line_are_settings() -> None:
    read = read_arguments(
        {
            "model": "/models/base",
            "max_num_seqs": "8",
            "enable_prefix_cache": "false",
            "kv_cache_bytes": "64MiB",
            "adapters": "zh=/a/zh,ja=/a/ja",
            "num_replicas": "2",
            "max_body_bytes": "1MiB",
        }
    )
    model = read.config.models["base"]
    assert (model.path, model.max_num_seqs, model.kv_cache_bytes) == ("/models/base", 8, 64 << 20)
    assert not model.enable_prefix_cache
    assert {name: adapter.path for name, adapter in model.adapters.items()} == {
        "zh": "/a/zh",
        "ja": "/a/ja",
    }
    assert read.options == {"num_replicas": 2}
    assert read.config.server.max_body_bytes == 1 << 20


def test_a_file_and_arguments_are_joined(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[models.m]\npath = "/m"\nmax_num_seqs = 4\nmax_queue_size = 10\n')
    read = read_arguments({"config": str(file), "max_num_seqs": 6})
    assert read.config.models["m"].max_num_seqs == 6
    assert read.max_ongoing_requests == 16


def test_paths_mean_the_same_in_the_working_folders_of_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "zh", "more"):
        Path(folder).mkdir()
    read = read_arguments({"model": "base", "adapters": "zh=zh,ja=hf://x", "adapter_dirs": "more"})
    model = read.config.models["base"]
    assert model.path == str(tmp_path / "base")
    assert [adapter.path for adapter in model.adapters.values()] == [str(tmp_path / "zh"), "hf://x"]
    assert model.adapter_dirs == (str(tmp_path / "more"),)
    assert read_arguments({"model": "org/hub-id"}).config.models["hub-id"].path == "org/hub-id"


def test_a_replica_has_a_gpu_for_each_rank() -> None:
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert read_arguments({"model": "m", "device": "cuda", **ranks}).num_devices == 4
    assert read_arguments({"model": "m", "device": "cpu", **ranks}).num_devices == 0


def test_a_device_is_chosen_where_ray_counts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Device("cuda", "NVIDIA H100")
    monkeypatch.setattr("loraplex.app.model_settings.find_device", lambda: found)
    read = read_arguments({"model": "m"})
    assert (read.num_devices, read.num_slots) == (1, 256)


def test_without_a_limit_of_the_queue_as_many_wait_as_run() -> None:
    assert read_arguments({"model": "m", "max_num_seqs": 6}).max_ongoing_requests == 12


def test_the_yaml_of_ray_serve_llm_is_read() -> None:
    read = read_arguments(
        {
            "llm_configs": [
                {
                    "model_loading_config": {"model_id": "qwen", "model_source": "Qwen/Qwen2"},
                    "lora_config": {
                        "dynamic_lora_loading_path": "/mnt/adapters",
                        "max_num_adapters_per_replica": 16,
                        "download_timeout_s": 30,
                    },
                    "deployment_config": {
                        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
                        "max_ongoing_requests": 64,
                    },
                    "engine_kwargs": {
                        "max_model_len": 4096,
                        "max_loras": 4,
                        "enable_prefix_caching": True,
                    },
                    "placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "PACK"},
                    "accelerator_type": "H100",
                }
            ]
        }
    )
    model = read.config.models["qwen"]
    assert (model.path, model.lora_root) == ("Qwen/Qwen2", "/mnt/adapters")
    assert (model.max_model_len, model.enable_prefix_cache) == (4096, True)
    assert read.config.server.adapter_load_seconds == 30
    assert read.options == {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
        "max_ongoing_requests": 64,
        "placement_group_bundles": [{"CPU": 1}],
        "placement_group_strategy": "PACK",
        "ray_actor_options": {"accelerator_type": "H100"},
    }


LOADING = {"model_loading_config": {"model_id": "m"}}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, ("model=FOLDER_OR_HUB_ID", "models.NAME")),
        ({"model": "m", "max_num_sequences": 3}, ("max_num_sequences", "max_num_seqs")),
        ({"model": "m", "max_num_seqs": "many"}, ("max_num_seqs", "str")),
        ({"name": "m"}, ("adapter_dirs",)),
        ({"model": "m", "num_replicas": "0"}, ("num_replicas", 0)),
        (
            {"model": "m", "num_replicas": 1, "max_replicas": 2},
            ("num_replicas", "max_replicas", "min_replicas"),
        ),
        ({"model": "m", "adapters": "zh"}, ("NAME=PATH", "zh")),
        (
            {"model": "m", "deployment_config": {"user_config": 1}},
            ("user_config", "deployment_config", "num_replicas"),
        ),
        ({"llm_configs": [LOADING, LOADING]}, ("llm_configs",)),
        (
            {"llm_configs": [{**LOADING, "server_cls": "x"}]},
            ("server_cls", "model_loading_config", "deployment_config"),
        ),
        ({**LOADING, "llm_engine": "SGLang"}, ("llm_engine", "SGLang")),
        (
            {**LOADING, "lora_config": {"max_download_tries": 3}},
            ("max_download_tries", "lora_config", "dynamic_lora_loading_path"),
        ),
        (
            {**LOADING, "lora_config": {"dynamic_lora_loading_path": "s3://b"}},
            ("adapter_declarations", "dynamic_lora_loading_path", "s3://b"),
        ),
        ({**LOADING, "engine_kwargs": {"swap": 1}}, ("swap",)),
        ({"model_loading_config": {}}, ("model_id", "model_loading_config")),
        ({**LOADING, "engine_kwargs": 3}, ("engine_kwargs", 3)),
        ({"model": "m", "executor": "ray"}, ("executor",)),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    arguments: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        read_arguments(arguments)
