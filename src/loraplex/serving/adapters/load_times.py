"""How long serving's part of loading adapters took: by model and stage."""

from collections.abc import Mapping

from loraplex.core.stats import Durations

_NONE_YET = Durations()


class LoadTimes:
    """Since the start."""

    def __init__(self) -> None:
        self._times: dict[str, dict[str, Durations]] = {}

    def observe(self, model: str, stage: str, seconds: float) -> None:
        stages = self._times.setdefault(model, {})
        stages[stage] = stages.get(stage, _NONE_YET).with_one(int(seconds * 1e9))

    def of_model(self, model: str) -> Mapping[str, Durations]:
        """By stage."""
        return self._times.get(model, {})
