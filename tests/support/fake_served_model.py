"""A served model whose adapters are their paths: whole but for the staging worker and the model."""

import asyncio
import functools
import hashlib
from collections.abc import Set
from pathlib import Path
from typing import Any

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import AdapterLoadError
from loraplex.core.plan import Capacity
from loraplex.demo import BASE_PATH
from loraplex.serving.backend import ModelCard
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.local_texts import ChatRenderer
from loraplex.serving.served_model import ServedModel
from loraplex.text.tokenizer import load_tokenizer
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.fake_loader import fake_source

_tokenizer = functools.cache(load_tokenizer)


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class FakeStaging:
    """A path's or a tensor's name is its content. Canonical adapter files exist and are empty."""

    policy = SourcePolicy()

    def __init__(self, state_dir: Path, capacity: Capacity, away: Set[str] = frozenset()) -> None:
        """away: paths that cannot be read; may change."""
        self._state_dir = state_dir
        self._capacity = capacity
        self._away = away

    async def stage(self, path: str, **_: Any) -> StagedAdapter:
        await asyncio.sleep(0)
        if path in self._away:
            raise AdapterLoadError(f"{path} is away")
        file = canonical_path(self._state_dir, digest_of(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        source = fake_source(digest_of(path), self._capacity.page_geometry)
        return StagedAdapter(source=source, dtypes=("F32",), num_tensors=2)

    async def stage_tensors(
        self, weights: RequestTensor, config: RequestTensor, **_: Any
    ) -> StagedAdapter:
        return await self.stage(bytes(weights.view).decode())

    async def start(self) -> None:
        pass

    async def keep_spare(self) -> None:
        pass

    async def close(self) -> None:
        pass


def fake_served_model(store: AdapterStore, capacity: Capacity) -> ServedModel:
    """Return a model `m` of the demo's tokenizer whose engine is a fake one on a thread."""
    card = ModelCard(
        name="m",
        path="/m",
        created=1,
        max_model_len=2048,
        vocab_size=capacity.vocab_size,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
        kv_dtype="float32",
    )
    engine = fake_engine_thread(FakeEngineSettings(capacity=capacity))
    return ServedModel(
        card=card,
        tokenizer=_tokenizer(BASE_PATH),
        chats=ChatRenderer({}),
        eos_token_ids=(0,),
        shapes=BaseShapes(20, {"q": (64, 64)}),
        config=ModelConfig(path=card.path),
        store=store,
        engine=AsyncEngine("m", engine, SystemClock()),
    )
