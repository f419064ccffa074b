"""Ray Serve's router of requests to replicas, by adapter residency and load.

Ray loads the class by its path: `loraplex.deploy.ray_router:AdapterRouter`.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from loraplex.deploy.routing import AdapterRouting, ReplicaReport


class AdapterRouter(RequestRouter):
    """Router of one deployment handle: `routing.AdapterRouting` with Ray's replicas."""

    def initialize_state(self, **kwargs: Any) -> None:
        del kwargs
        self._routing = AdapterRouting()
        self._stats: dict[str, Any] = {}
        """Statistics of each replica that were read last."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        self._routing.keep_only(names)
        self._stats = {name: stats for name, stats in self._stats.items() if name in names}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads: dict[str, int | None] = {}
        for name, replica in by_name.items():
            stats = replica.routing_stats
            if stats and stats is not self._stats.get(name):
                self._stats[name] = stats
                self._routing.take_report(name, ReplicaReport.of_stats(stats))
            loads[name] = self.replica_queue_len_cache.get(replica.replica_id)
        adapter = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        return [[by_name[name]] for name in self._routing.rank(adapter, loads)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._routing.note_sent(pending_request.metadata.multiplexed_model_id, replica_id.unique_id)
