"""Ranks as actors of a Ray cluster, on one machine or several. Needs loraplex[ray]."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.errors import ConfigError
from loraplex.core.log_lines import log_to_standard_error
from loraplex.parallel.executors import RankEnd
from loraplex.parallel.messages import RankStart
from loraplex.parallel.rank_process import ProgramOf, run_rank

try:
    import ray
    from ray.job_config import JobConfig
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise ConfigError(
        "executor ray needs Ray, which is not installed: pip install 'loraplex[ray]'",
        param="executor",
    ) from missing

logger = logging.getLogger(__name__)

PLACE_SECONDS: Final = 120.0
"""How long the cluster may take to find places: Ray itself waits for ever."""
_LOOK_SECONDS: Final = 1.0
"""Interval at which the watching thread sees that the executor has been stopped."""
_HERE: Final = 0.001
"""Share of a node's own resource, which binds a bundle to that node."""
_RANK_VARIABLES: Final = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # a rank chooses its device by its rank
    "PYTHONSAFEPATH": "1",
}


class RayExecutor:
    """Implements Executor. The ranks of one stage are on one node, those of stage 0 on this one."""

    def __init__(
        self,
        program_of: ProgramOf,
        *,
        device: str = "cpu",
        cpus: int = 1,
        log_level: str = "info",
        place_seconds: float = PLACE_SECONDS,
    ) -> None:
        """Connect to the cluster that RAY_ADDRESS names, or that runs here, or start one.

        program_of: a function of a module, which every node can import. cpus: for each rank.
        """
        self._program_of = program_of
        self._bundle: dict[str, float] = {"CPU": cpus}
        if device.startswith("cuda"):
            self._bundle["GPU"] = 1
        self._log_level = log_level
        self._place_seconds = place_seconds
        if not ray.is_initialized():
            # Ray gives its workers the driver's current folder as the first one of their search
            # path, and leaves it out only for jobs that a client sent.
            ray.init(log_to_driver=True, job_config=JobConfig(_client_job=True))
        self.host: str = ray.util.get_node_ip_address()
        self._groups: list[PlacementGroup] = []
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}
        """Ranks, by Ray's reference to the result of their run."""
        self._is_stopped = threading.Event()

    def start(self, starts: Sequence[RankStart], ended: Callable[[RankEnd], None]) -> None:
        places = self._places(starts[0].world.tensor_parallel_size, starts)
        # Threads inside one actor: none of its calls may wait for `run`.
        actor = ray.remote(max_restarts=0, max_concurrency=1)(_Rank)
        for start in starts:
            place = places[start.world.rank]
            rank = actor.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=place,
                runtime_env={"env_vars": _RANK_VARIABLES},
            ).remote()
            self._actors.append(rank)
            run = rank.run.remote(msgspec.msgpack.encode(start), self._program_of, self._log_level)
            self._runs[run] = start.world.rank
        threading.Thread(target=self._watch, args=(ended,), name="ranks", daemon=True).start()

    def stop(self, seconds: float) -> None:
        self._is_stopped.set()
        actors, self._actors = self._actors, []
        groups, self._groups = self._groups, []
        with contextlib.ExitStack() as stack:  # calls the last one first
            for group in groups:
                stack.callback(remove_placement_group, group)
            for actor in actors:
                stack.callback(ray.kill, actor, no_restart=True)
            if self._runs and seconds:
                ray.wait(list(self._runs), num_returns=len(self._runs), timeout=seconds)

    def _places(
        self, tensor_parallel_size: int, starts: Sequence[RankStart]
    ) -> dict[int, PlacementGroupSchedulingStrategy]:
        """Reserve a place for each rank, also for rank 0, which is no actor. Raises ConfigError."""
        places = {}
        num_stages = starts[0].world.pipeline_parallel_size
        for stage in range(num_stages):
            bundles = [dict(self._bundle) for _ in range(tensor_parallel_size)]
            if stage == 0:
                bundles[0][f"node:{self.host}"] = _HERE
            group = placement_group(bundles, strategy="STRICT_PACK")
            self._groups.append(group)
            if not group.wait(self._place_seconds):
                raise ConfigError(
                    f"the Ray cluster has no node with {bundles} for stage {stage}; it has "
                    f"{ray.available_resources()} available in total",
                    param="executor",
                )
            for index in range(tensor_parallel_size):
                places[stage * tensor_parallel_size + index] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                )
        return places

    def _watch(self, ended: Callable[[RankEnd], None]) -> None:
        left = list(self._runs)
        while left and not self._is_stopped.is_set():
            done, left = ray.wait(left, timeout=_LOOK_SECONDS)
            for run in done:
                ended(_end(self._runs[run], run))


def _end(rank: int, run: Any) -> RankEnd:
    try:
        was_stopped = ray.get(run)
    except ray.exceptions.RayTaskError as error:
        return RankEnd(rank, f"failed: {error}")
    except ray.exceptions.RayError as error:
        # What ends an actor's process without an exception comes from outside most of the time.
        return RankEnd(rank, f"was killed: {' '.join(str(error).split())}", is_kill=True)
    return RankEnd(rank, "ended" if was_stopped else "ended with an error")


class _Rank:
    """Actor of one rank."""

    def run(self, start: bytes, program_of: ProgramOf, log_level: str) -> bool:
        """Be a rank until it is stopped; False if it failed."""
        decoded = msgspec.msgpack.decode(start, type=RankStart)
        log_to_standard_error(log_level, f"rank {decoded.world.rank}")
        host = ray.util.get_node_ip_address()
        return run_rank(msgspec.structs.replace(decoded, host=host), program_of)
