"""One rank's program: what it must have equal, and its threads."""

import json
import logging
import shutil

import pytest
import torch

from loraplex.app.rank import ModelRank, rank_command, world_of
from loraplex.core.config import ModelConfig
from loraplex.demo import BASE_PATH
from loraplex.parallel.world import World, check_traits


def rank_of(folder=BASE_PATH, world=World(0, 2, 1), **settings):  # noqa: B008
    return ModelRank(ModelConfig(path=str(folder), **settings), world)


def test_a_copy_of_the_checkpoint_is_the_same(tmp_path):
    copy = shutil.copytree(BASE_PATH, tmp_path / "copy")
    check_traits(rank_of().traits(), 1, rank_of(copy).traits())


@pytest.mark.parametrize("change", ["config", "weights"])
def test_another_checkpoint_is_noticed(tmp_path, change):
    copy = shutil.copytree(BASE_PATH, tmp_path / "copy")
    if change == "config":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 3.0}))
    else:
        with (copy / "model.safetensors").open("ab") as file:
            file.write(b"\0")
    other = rank_of(copy).traits()
    differing = {name for name, value in rank_of().traits().items() if other[name] != value}
    assert differing == {"checkpoint"}


@pytest.mark.parametrize(
    ("world", "settings", "expected"),
    [
        (World(1, 2, 1), {}, [4]),
        (World(1, 2, 2), {}, [2]),
        (World(1, 16, 1), {}, [1]),
        (World(1, 2, 2), {"executor": "ray"}, [4]),
        (World(1, 2, 1), {"num_threads": 3}, [3]),
        (World(), {}, []),
    ],
)
def test_ranks_of_a_machine_divide_its_threads(monkeypatch, world, settings, expected):
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    rank_of(world=world, **settings)._limit_threads()
    assert chosen == expected


def test_the_world_is_that_of_the_settings():
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert world_of(ModelConfig(path="/m", **sizes)) == World(0, 4, 2)


def test_a_rank_logs_as_the_engine_does():
    with_level = logging.getLogger()
    before = with_level.level
    try:
        with_level.setLevel(logging.ERROR)
        assert rank_command(3)[-2:] == ("error", "3")
    finally:
        with_level.setLevel(before)
