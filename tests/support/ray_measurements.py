"""Replicas on Ray that report hits of their adapter pools, and a router that has no reasons.

Ray's workers import this module by its name.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from loraplex.deploy.ray import LoraplexReplica

RANDOM_ROUTER = "support.ray_measurements:RandomRouter"


class MeasuredReplica(LoraplexReplica):
    """A replica whose statistics also count admissions that found their adapter on the device."""

    async def record_routing_stats(self) -> dict[str, Any]:
        service = self._replica._served.service
        tiers = [service.model(card.name).stats.adapters for card in service.models()]
        return await super().record_routing_stats() | {
            "hits": sum(tier.device_hits for tier in tiers),
            "misses": sum(tier.device_misses for tier in tiers),
        }


class RandomRouter(RequestRouter):
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        return [[replica] for replica in shuffled]
