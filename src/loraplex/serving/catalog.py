"""What is served, under which names, for whom."""

from collections.abc import Iterator, Mapping, Sequence

from loraplex.core.adapter import AdapterKey, ByName
from loraplex.core.errors import LoraplexError, ModelNotFoundError
from loraplex.core.principal import LOCAL, Principal
from loraplex.serving.adapters.cards import AdapterCard, card_of, without_sources
from loraplex.serving.served_model import ServedModel


class Catalog:
    """Base models and adapters. What a tenant has no right to see is not there for it: errors and
    listings are as if there were none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.card.name: model for model in models}

    def of(self, principal: Principal) -> Mapping[str, ServedModel]:
        """The base models that are there for who asks, by name."""
        allowed = principal.rights.models
        return {name: model for name, model in self.models.items() if name in allowed}

    def model(self, name: str, principal: Principal = LOCAL) -> ServedModel:
        """Raises ModelNotFoundError."""
        models = self.of(principal)
        if name not in models:
            raise ModelNotFoundError(
                f"there is no model {name!r} here; there are: {_listing(list(models))}",
                param="model",
            )
        return models[name]

    def adapters(self, principal: Principal, model: str | None = None) -> list[AdapterCard]:
        """Of one model, or of all. Raises ModelNotFoundError."""
        models = self.of(principal).values() if model is None else [self.model(model, principal)]
        return [card for one in models for card in _cards(one, principal)]

    def find(self, name: str, principal: Principal) -> tuple[ServedModel, AdapterKey | None]:
        """As Backend.find. Raises ModelNotFoundError."""
        models = self.of(principal)
        if name in models:
            return models[name], None
        matches = [
            (model, adapter)
            for model, adapter in _readings(name, models)
            if model.adapters_of(principal).find(ByName(adapter)) is not None
        ]
        if not matches:
            raise self._unknown(name, principal)
        if len(matches) > 1:
            choices = " or ".join(f"{model.card.name}:{adapter}" for model, adapter in matches)
            raise ModelNotFoundError(f"{name!r} is ambiguous; say {choices}", param="model")
        model, adapter = matches[0]
        return model, ByName(adapter)

    def _unknown(self, name: str, principal: Principal) -> LoraplexError:
        known = [*self.of(principal), *(card.name for card in self.adapters(principal))]
        return ModelNotFoundError(
            f"there is no model or adapter {name!r} here; there are: {_listing(known)}",
            param="model",
        )


def _cards(model: ServedModel, principal: Principal) -> Iterator[AdapterCard]:
    seen = model.adapters_of(principal)
    for version in seen.listed():
        card = card_of(version, model.state_of(version))
        yield card if seen.owns(version) else without_sources(card)


def _readings(name: str, models: Mapping[str, ServedModel]) -> Iterator[tuple[ServedModel, str]]:
    """What a name may mean: `adapter` of any model, or `base:adapter`."""
    for base, model in models.items():
        yield model, name
        if name.startswith(f"{base}:"):
            yield model, name.removeprefix(f"{base}:")


def _listing(names: list[str], most: int = 20) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
