"""The adapters of an EchoBackend: their cards and what they are called. They hold no weights."""

import hashlib

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterExistsError, AdapterNotFoundError
from loraplex.serving.backend import AdapterCard

CREATED = 1_700_000_000
"""Unix seconds: when every model and adapter of an EchoBackend was made."""


class EchoAdapters:
    """Cards by (model, name). A version before the present one is forgotten."""

    def __init__(self) -> None:
        self._cards: dict[tuple[str, str], AdapterCard] = {}

    def cards(self, model: str | None = None) -> list[AdapterCard]:
        return [card for card in self._cards.values() if model in (None, card.model)]

    def add(
        self,
        model: str,
        name: str,
        *,
        source: str,
        digest: str = "",
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterCard:
        """Without a digest it is the SHA-256 of the source. Raises AdapterExistsError."""
        if not replace and (model, name) in self._cards:
            raise AdapterExistsError(f"{name!r} is already served", param="name")
        card = AdapterCard(
            name=name,
            model=model,
            task_id=task_id,
            digest=digest or hashlib.sha256(source.encode()).hexdigest(),
            created=CREATED,
            rank=8,
            num_bytes=1024,
            source=source,
        )
        self._cards[model, name] = card
        return card

    def add_tensors(
        self, model: str, task_id: int | None, weights: RequestTensor, config: RequestTensor
    ) -> AdapterKey:
        """Any tensors are an adapter; its digest is the SHA-256 of their bytes."""
        digest = hashlib.sha256(bytes(weights.view) + bytes(config.view)).hexdigest()
        key = ByDigest(digest) if task_id is None else ByTaskId(task_id)
        present = next((card for card in self.cards(model) if _matches(card, key)), None)
        if present is not None:
            name = present.name
        else:
            name = f"inline-{digest[:12]}" if task_id is None else str(task_id)
        if present is None or present.digest != digest:
            source = "a request's lora_weights"
            self.add(model, name, source=source, digest=digest, task_id=task_id, replace=True)
        return key

    def card(self, model: str, key: AdapterKey) -> AdapterCard:
        """Raises AdapterNotFoundError."""
        for card in self.cards(model):
            if _matches(card, key):
                return card
        ref = AdapterRef(model, "", key)
        raise AdapterNotFoundError(f"there is no {ref} for model {model!r}", param="adapter")

    def remove(self, model: str, key: AdapterKey) -> None:
        """Raises AdapterNotFoundError."""
        card = self.card(model, key)
        del self._cards[card.model, card.name]


def _matches(card: AdapterCard, key: AdapterKey) -> bool:
    match key:
        case ByName(name):
            return card.name == name
        case ByTaskId(task_id):
            return card.task_id == task_id
        case ByDigest(digest):
            return card.digest == digest
