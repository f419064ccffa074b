"""Which GPU a rank gets, and how ranks meet."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraplex.app.rank import GpuChannels, rank_device
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.parallel.world import World
from support.naming import refused


def model(device: str, executor: str = "multiprocess") -> ModelConfig:
    return ModelConfig(path="m", device=device, executor=executor)


@pytest.mark.parametrize(
    ("device", "world", "expected"),
    [
        ("cpu", World(1, 2), "cpu"),
        ("cuda", World(), "cuda"),
        ("cuda", World(0, 2), "cuda:0"),
        ("cuda", World(3, 2, 2), "cuda:3"),
        ("cuda:2", World(1, 2), "cuda:3"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(device: str, world: World, expected: str) -> None:
    assert rank_device(model(device), world, num_gpus=4) == expected


def test_an_actor_sees_its_own_gpu() -> None:
    assert rank_device(model("cuda", "ray"), World(1, 2), num_gpus=1) == "cuda"


def test_too_few_gpus_are_refused() -> None:
    with refused(ConfigError, 4, "cuda:1", 3, 2, param="tensor_parallel_size"):
        rank_device(model("cuda:1"), World(0, 4), num_gpus=3)


def test_ranks_of_a_stage_meet_at_its_leader() -> None:
    worlds = [World(rank, 2, 2) for rank in range(4)]
    ranks = [GpuChannels(world, torch.device("cpu")) for world in worlds]
    addresses = [rank.open() for rank in ranks]
    assert [bool(address) for address in addresses] == [True, False, True, False]

    def meet(rank: int) -> list[float]:
        ranks[rank].connect(addresses[worlds[rank].stage_leader])
        channels = ranks[rank].connected
        assert channels is not None
        return [float(tensor) for tensor in channels.steps.gather(torch.tensor(float(rank)))]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(meet, range(4))) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks[0].wait_ns() == 0
