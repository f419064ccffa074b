"""Whatever is loaded, replaced, unloaded, rolled back and restarted: a request is served with the
very bytes that its adapter's name meant when it came, and by no block of older ones.

Serving is whole but for the staging worker; the engine is a real one whose model is a hash of the
tokens and the adapter's digest, and whose blocks know what they hold. The device fits two adapters.
"""

import asyncio
import dataclasses
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import (
    AdapterChoice,
    AdapterRef,
    AdapterUse,
    ByName,
    ByTaskId,
    LoadPolicy,
)
from loraplex.core.clock import SystemClock
from loraplex.core.errors import AdapterNotFoundError, StepFailedError
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving import admission
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.engine_requests import engine_request
from support.examples import examples
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY
from support.fake_served_model import FakeStaging, digest_of, fake_served_model

CAPACITY = msgspec.structs.replace(FAKE_CAPACITY, vocab_size=1024, num_adapter_pages=2)
MODEL = FakeModel(CAPACITY.vocab_size)
PROMPT = tuple(range(1, 40))
"""Longer than two blocks, so that they are there to be reused wrongly."""
NAMES = st.sampled_from(["cats", "dogs", "cows"])
TASK_IDS = st.sampled_from([0, 7])
CONTENTS = st.sampled_from("abcd")


def build(state_dir: Path) -> Service:
    model = fake_served_model(AdapterStore.open(state_dir), CAPACITY)
    staging = FakeStaging(state_dir, CAPACITY)
    return Service([model], staging, RequestMetrics(["m"]), SystemClock())


def expected(digest: str, num_tokens: int) -> list[int]:
    """Tokens that the fake model generates with an adapter, alone."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
    request = engine_request(
        PROMPT, sampling, eos_token_ids=(0,), adapters=(AdapterUse(digest),), tenant="default"
    )
    return MODEL.output(request, 0, num_tokens)


async def start_request(service, key, num_tokens, policy=LoadPolicy.AUTO):
    return await service.generate(
        GenerateRequest(
            request_id=service.new_request_id(),
            model="m",
            prompt=PROMPT,
            task=Generate(SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)),
            adapters=(AdapterChoice(key),),
            load_policy=policy,
        ),
        LOCAL,
    )


async def read(stream) -> tuple[list[int], str]:
    """Its tokens, and the digest that it names."""
    outputs = [output async for output in stream]
    tokens = [t for output in outputs for s in output.sequences for t in s.token_ids]
    return tokens, outputs[-1].adapters[0].digest


def ref(name: str) -> AdapterRef:
    return AdapterRef("m", "default", ByName(name))


@dataclasses.dataclass
class Shadow:
    """Expected state of one name."""

    task_id: int | None
    history: list[tuple[int, str]]
    """(number, digest), the newest first."""

    @property
    def digest(self) -> str:
        return self.history[0][1]

    def put(self, digest: str) -> None:
        if digest != self.digest:
            self.history.insert(0, (self.history[0][0] + 1, digest))


class ServedAdaptersMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.state_dir = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.service = build(self.state_dir)
        self.do(self.service.start())
        self.adapters: dict[str, Shadow] = {}
        self.running = []
        """(stream, name, digest, number of tokens)"""

    def do(self, work):
        async def in_time():
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(in_time())

    def teardown(self):
        self.finish_all()
        self.do(self.service.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.state_dir)

    @rule(name=NAMES, content=CONTENTS, canary=st.booleans(), dry_run=st.booleans())
    def load(self, name, content, canary, dry_run):
        report = self.do(
            self.service.adapter_admin.load(
                LOCAL,
                model="m",
                name=name,
                path=content,
                replace=True,
                canary=canary,
                dry_run=dry_run,
            )
        )
        number, digest = self.adapters[name].history[0] if name in self.adapters else (0, "")
        assert report.version == number + (digest != digest_of(content))
        if not dry_run:
            self.put(name, digest_of(content), None)

    @rule(task_id=TASK_IDS, content=CONTENTS)
    def upload(self, task_id, content):
        tensor = RequestTensor("FP16", (1, 1), content.encode())
        self.do(
            self.service.adapter_admin.load_tensors(
                LOCAL, model="m", task_id=task_id, weights=tensor, config=tensor
            )
        )
        self.put(str(task_id), digest_of(content), task_id)

    def put(self, name, digest, task_id):
        if name in self.adapters:
            self.adapters[name].put(digest)
        else:
            self.adapters[name] = Shadow(task_id, [(1, digest)])

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), mode=st.sampled_from(UnloadMode))
    def unload(self, data, mode):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        self.do(self.service.adapter_admin.unload(LOCAL, ref(name), mode))
        del self.adapters[name]
        if mode is UnloadMode.IMMEDIATE:
            ended = [one for one in self.running if one[1] == name]
            self.running = [one for one in self.running if one[1] != name]
            for stream, _, digest, num_tokens in ended:
                try:
                    tokens, _ = self.do(read(stream))
                except AdapterNotFoundError:
                    continue
                assert tokens == expected(digest, num_tokens), "it had ended before"

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def rollback(self, data):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        adapter = self.adapters[name]
        number, digest = data.draw(st.sampled_from(adapter.history[:10]))
        self.do(self.service.adapter_admin.rollback(LOCAL, ref(name), number))
        adapter.put(digest)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), policy=st.sampled_from([LoadPolicy.AUTO, LoadPolicy.ALWAYS]))
    def request(self, data, policy):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        adapter = self.adapters[name]
        if policy is LoadPolicy.ALWAYS and adapter.task_id is None:
            source = self.do(self.service.adapter_admin.describe(LOCAL, ref(name))).source
            adapter.put(digest_of(source))
        key = ByName(name) if adapter.task_id is None else ByTaskId(adapter.task_id)
        tokens, digest = self.do(self.send_request(key, 5, policy))
        assert digest == adapter.digest
        assert tokens == expected(digest, 5)

    async def send_request(self, key, num_tokens, policy):
        return await read(await start_request(self.service, key, num_tokens, policy))

    @precondition(lambda self: self.adapters and len(self.running) < 4)
    @rule(data=st.data(), num_tokens=st.integers(1, 60))
    def begin(self, data, num_tokens):
        """It ends on the version that it began with, whatever happens meanwhile."""
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        stream = self.do(start_request(self.service, ByName(name), num_tokens))
        self.running.append((stream, name, self.adapters[name].digest, num_tokens))

    @rule()
    def finish_all(self):
        for stream, _, digest, num_tokens in self.running:
            assert self.do(read(stream)) == (expected(digest, num_tokens), digest)
        self.running.clear()

    @rule()
    def upkeep(self):
        self.do(self.service._upkeep.run_once())

    @rule()
    def restart(self):
        self.finish_all()
        self.do(self.service.close())
        self.service = build(self.state_dir)
        self.do(self.service.start())

    @invariant()
    def names_mean_what_they_should(self):
        cards = {card.name: card for card in self.service.adapters(LOCAL)}
        found = {name: (card.version, card.digest, card.task_id) for name, card in cards.items()}
        assert found == {
            name: (*adapter.history[0], adapter.task_id) for name, adapter in self.adapters.items()
        }

    @invariant()
    def the_engine_knows_nothing_else(self):
        """What a late request brought back may stay until the next upkeep; there is none here."""
        registered = self.service._models["m"].engine.registered
        named = {adapter.digest for adapter in self.adapters.values()}
        in_work = {digest for _, _, digest, _ in self.running}
        assert registered <= named | in_work


TestServedAdapters = ServedAdaptersMachine.TestCase
TestServedAdapters.settings = examples(0.2, stateful_step_count=25)


async def tokens_after_replacement(state_dir: Path) -> list[int]:
    """Return the tokens of an adapter whose prompt's blocks were cached under earlier bytes."""
    service = build(state_dir)
    await service.start()
    try:
        for content in ("a", "b"):
            await service.adapter_admin.load(LOCAL, model="m", name="x", path=content, replace=True)
            tokens, _ = await read(await start_request(service, ByName("x"), 5))
        return tokens
    finally:
        await service.close()


async def test_a_replaced_adapter_never_uses_an_old_block(tmp_path, monkeypatch, caplog):
    """And it would, were the digest not in the salt of every block."""
    assert await tokens_after_replacement(tmp_path / "1") == expected(digest_of("b"), 5)
    salt = admission.kv_salt
    monkeypatch.setattr(
        admission,
        "kv_salt",
        lambda model, dtype, adapters, *others: salt(model, dtype, (), *others),
    )
    with pytest.raises(StepFailedError):
        await tokens_after_replacement(tmp_path / "2")
    assert "block 0 of cache group 0 does not hold positions 0 to 15" in caplog.text
