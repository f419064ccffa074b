"""Share of requests that find their adapter on the device of a replica: by residency, at random."""

import itertools
import json
import random
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from safetensors.torch import load_file, save_file

import loraplex.deploy.ray as deployed
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.ray_measurements import RANDOM_ROUTER, MeasuredReplica

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]
NODE_CPUS = 4
NUM_ADAPTERS, NUM_REQUESTS, NUM_REPLICAS = 200, 600, 4
PAGE_BYTES = 264_192
"""An adapter of rank 8 of the shipped model takes one page."""
ON_DEVICE = 64


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters that differ in one weight, and so in their digest."""
    folder = tmp_path_factory.mktemp("adapters")
    source = ADAPTER_PATHS["chinese"]
    tensors = load_file(source / "adapter_model.safetensors")
    first = next(iter(tensors.values())).view(-1)
    for number in range(NUM_ADAPTERS):
        (folder / f"a{number}").mkdir()
        first[0] = number / 1024
        save_file(tensors, folder / f"a{number}" / "adapter_model.safetensors")
        config = (source / "adapter_config.json").read_bytes()
        (folder / f"a{number}" / "adapter_config.json").write_bytes(config)
    return folder


def counts() -> tuple[int, int]:
    """(hits, misses) of all replicas since they started."""
    found: list[dict[str, Any]] = [
        ray.get(ray.get_actor(**actor).record_routing_stats.remote())
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if deployed.REPLICA in actor["name"]
    ]
    assert len(found) == NUM_REPLICAS
    return sum(stats["hits"] for stats in found), sum(stats["misses"] for stats in found)


def hit_rate(folder: Path, state: Path, names: list[str]) -> float:
    """Deploy, load each adapter once, and return the share of hits of the named requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    arguments = {
        "model": str(BASE_PATH),
        "name": "capitals",
        "adapter_dirs": str(folder),
        "max_num_seqs": 8,
        "max_lora_rank": 8,
        "lora_device_bytes": ON_DEVICE * PAGE_BYTES,
        "num_replicas": NUM_REPLICAS,
        "state_dir": str(state),
        "deployment_config": {"ray_actor_options": {"num_cpus": 1}},
    }
    serve.run(deployed.app(arguments))

    def request(name: str) -> None:
        body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1}).encode()
        headers = {"content-type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=240).read()

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(request, (f"a{number}" for number in range(NUM_ADAPTERS))))
            before = counts()
            list(pool.map(request, names))
        hits, misses = (after - b for after, b in zip(counts(), before, strict=True))
        assert hits + misses >= len(names)
        return hits / (hits + misses)
    finally:
        serve.shutdown()


def test_nine_of_ten_requests_find_their_adapter_on_the_device(
    cluster: None, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = list(itertools.accumulate(1 / rank for rank in range(1, NUM_ADAPTERS + 1)))
    numbers = random.Random(1).choices(range(NUM_ADAPTERS), cum_weights=weights, k=NUM_REQUESTS)
    names = [f"a{number}" for number in numbers]
    monkeypatch.setattr(deployed, "LoraplexReplica", MeasuredReplica)
    routed = hit_rate(adapters, tmp_path / "routed", names)
    monkeypatch.setattr(deployed, "_ROUTER", RANDOM_ROUTER)
    randomly = hit_rate(adapters, tmp_path / "random", names)
    print(f"on the device: {routed:.1%} by residency and load, {randomly:.1%} at random")
    assert routed >= 0.9
    assert routed > randomly
