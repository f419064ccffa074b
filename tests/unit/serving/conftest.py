"""What tests of serving share: requests, models on fake engines, and folders that must go."""

import asyncio
import tempfile
import time

import msgspec
import pytest

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staged import Examination, StagedAdapter
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterUse
from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import InvalidAdapterError, LoraplexError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.demo import BASE_PATH
from loraplex.serving.backend import ModelCard
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.local_texts import ChatRenderer
from loraplex.serving.served_model import ServedModel
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.text.tokenizer import load_tokenizer
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY


@pytest.fixture
def make_request():
    """A function (request_id, *digests, max_tokens, n, **fields) -> EngineRequest; greedy."""

    def make(
        request_id: int = 1, *digests: str, max_tokens: int = 3, n: int = 1, **fields
    ) -> EngineRequest:
        sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=0, temperature=0)
        defaults = {
            "request_id": request_id,
            "prompt_token_ids": (1, 2, 3),
            "task": Generate(fields.pop("sampling", sampling)),
            "eos_token_ids": (0,),
            "adapters": tuple(map(AdapterUse, digests)),
            "kv_salt": repr(digests).encode(),
            "tenant": "default",
            "priority": 0,
            "arrival_ns": time.monotonic_ns(),
            "deadline_ns": None,
        }
        return EngineRequest(**(defaults | fields))

    return make


@pytest.fixture
def temporary_folder(monkeypatch, tmp_path_factory):
    """Where temporary folders are made meanwhile; none may be left."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


class FakeStaging:
    """A staging worker without files: `staged` has what each path gives, or the error it raises."""

    policy = SourcePolicy()

    def __init__(self) -> None:
        self.staged: dict[str, StagedAdapter | LoraplexError] = {}
        self.requests: list[dict] = []
        self.is_closed = False

    def put(
        self, path: str, digest: str = "", *, num_pages: int = 1, num_bytes: int = 100, **fields
    ) -> str:
        """`path` will be this adapter; gives the path."""
        source = fake_source(
            digest or f"digest of {path}",
            FAKE_CAPACITY.page_geometry,
            num_pages=num_pages,
            num_bytes=num_bytes,
        )
        fields = {"dtypes": ("F32",), "num_tensors": 2} | fields
        self.staged[path] = StagedAdapter(source=source, **fields)
        return path

    async def stage(self, path: str, **options) -> StagedAdapter:
        self.requests.append({"path": path} | options)
        await asyncio.sleep(0)
        staged = self.staged.get(path, InvalidAdapterError(f"{path} is not an adapter"))
        if isinstance(staged, LoraplexError):
            raise staged
        return staged

    async def examine(self, path: str, **options) -> Examination:
        staged = await self.stage(path, **options)
        return Examination(format="PEFT", num_tensors=staged.num_tensors)

    async def stage_tensors(self, lora_weights, lora_config, **options) -> StagedAdapter:
        """Stage an adapter whose path is given by the bytes of lora_weights."""
        return await self.stage(bytes(lora_weights.view).decode(), config=lora_config, **options)

    async def start(self):
        pass

    async def keep_spare(self):
        pass

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def staging():
    return FakeStaging()


@pytest.fixture(scope="session")
def capitals_tokenizer():
    return load_tokenizer(BASE_PATH)


@pytest.fixture
def make_model(capitals_tokenizer):
    """A function (name, settings, **config) -> ServedModel whose engine is fake, in a thread."""
    store = AdapterStore()

    def make(name: str, settings: FakeEngineSettings | None = None, **config) -> ServedModel:
        capacity = msgspec.structs.replace(FAKE_CAPACITY, vocab_size=1024)
        settings = settings or FakeEngineSettings()
        settings = msgspec.structs.replace(settings, capacity=capacity)
        card = ModelCard(
            name=name,
            path=f"/models/{name}",
            created=1,
            max_model_len=9999,
            vocab_size=1024,
            eos_token_id=0,
            pad_token_id=0,
            dtype="float32",
            kv_dtype="float32",
        )
        return ServedModel(
            card=card,
            tokenizer=capitals_tokenizer,
            chats=ChatRenderer(find_templates(BASE_PATH), capitals_tokenizer.special_tokens),
            eos_token_ids=(0,),
            shapes=BaseShapes(20, {"q": (64, 64)}),  # as fake_source has them
            config=ModelConfig(path=card.path, **config),
            store=store,
            engine=AsyncEngine(name, fake_engine_thread(settings), SystemClock()),
        )

    return make
