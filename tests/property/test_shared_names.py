"""Servers that share declarations agree on what names mean, whatever they load, unload and miss.

Each server is whole but for the staging worker and the model. A person edits documents, too; a
server may miss any number of readings, restart, and fail to stage.
"""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.adapters.declaration_places import open_place
from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterNotFoundError,
    LoraplexError,
    ModelNotFoundError,
)
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.testing.fake_clock import FakeClock
from support.examples import examples
from support.fake_runner import FAKE_CAPACITY
from support.fake_served_model import FakeStaging, digest_of, fake_served_model

CAPACITY = msgspec.structs.replace(FAKE_CAPACITY, vocab_size=1024)
NAMES = st.sampled_from(["cats", "dogs"])
CONTENTS = st.sampled_from(["/a", "/b", "/c"])
SERVERS = st.sampled_from([0, 1])
AN_HOUR = 3600


class Server:
    """One server, which reads the declarations only when a request or the test needs it."""

    def __init__(self, folder: Path, away: set[str]) -> None:
        self.state_dir = Path(tempfile.mkdtemp())
        self._folder = str(folder)
        self._away = away
        self.clock = FakeClock()

    async def start(self) -> None:
        self.store = AdapterStore.open(self.state_dir)
        self.service = Service(
            [fake_served_model(self.store, CAPACITY)],
            FakeStaging(self.state_dir, CAPACITY, self._away),
            RequestMetrics(["m"]),
            self.clock,
            declarations=SharedDeclarations(open_place(self._folder), self._folder, 100),
        )
        await self.service.start()

    async def look(self) -> None:
        self.clock.advance_seconds(AN_HOUR)  # past the pauses of loads that failed
        await self.service.declared.refresh()
        await self.service.declared.update()

    async def load(self, name: str, path: str):
        return await self.service.adapter_admin.load(
            LOCAL, model="m", name=name, path=path, replace=True
        )

    async def unload(self, name: str):
        ref = AdapterRef("m", "default", ByName(name))
        return await self.service.adapter_admin.unload(LOCAL, ref)

    async def use(self, name: str) -> str:
        """Return the digest that a request named, as an OpenAI client sends it, runs with."""
        card, key = await self.service.find(name, LOCAL)
        request = GenerateRequest(
            request_id=self.service.new_request_id(),
            model=card.name,
            prompt=(1, 2, 3),
            task=Generate(SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)),
            adapters=(AdapterChoice(key),),
        )
        outputs = [one async for one in await self.service.generate(request, LOCAL)]
        return outputs[-1].adapters[0].digest


class SharedNamesMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.away: set[str] = set()
        self.servers = [Server(self.folder, self.away) for _ in range(2)]
        self.truth: dict[str, tuple[int, str | None]] = {}
        """Greatest version of each name, with its content; None: it is removed."""
        self.declared: dict[str, dict[int, str | None]] = {}
        """Everything that was ever declared."""
        self.edited: set[str] = set()
        """Names of which a person wrote the present document."""
        for server in self.servers:
            self.do(server.start())

    def do(self, work):
        async def in_time():
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(in_time())

    def teardown(self):
        self.away.clear()
        self.all_agree()
        for server in self.servers:
            self.do(server.service.close())
            shutil.rmtree(server.state_dir)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.folder)

    def note(self, name, version, content):
        assert version > self.truth.get(name, (0, None))[0]
        self.edited.discard(name)
        self.truth[name] = version, content
        self.declared.setdefault(name, {})[version] = content

    @rule(server=SERVERS, name=NAMES, content=CONTENTS)
    def load(self, server, name, content):
        version, present = self.truth.get(name, (0, None))
        try:
            report = self.do(self.servers[server].load(name, content))
        except AdapterLoadError:
            assert content in self.away
            return
        assert report.digest == digest_of(content)
        if present == content and name not in self.edited:
            assert (report.version, report.is_unchanged) == (version, True)
        else:  # a person's document has no digest: the load declares the one that it found
            assert report.version == version + 1
            self.note(name, report.version, content)

    @rule(name=NAMES, contents=st.tuples(CONTENTS, CONTENTS))
    def load_through_both_at_once(self, name, contents):
        async def both():
            loads = [s.load(name, c) for s, c in zip(self.servers, contents, strict=True)]
            return await asyncio.gather(*loads, return_exceptions=True)

        results = self.do(both())
        for result, content in zip(results, contents, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, AdapterExistsError) or content in self.away, result
        won = [one for one in results if not isinstance(one, BaseException)]
        assert won or self.away.intersection(contents)
        for report in sorted(won, key=lambda report: report.version):
            content = next(c for c in contents if digest_of(c) == report.digest)
            if self.truth.get(name) != (report.version, content):
                self.note(name, report.version, content)

    @rule(server=SERVERS, name=NAMES)
    def unload(self, server, name):
        version, content = self.truth.get(name, (0, None))
        try:
            unloaded = self.do(self.servers[server].unload(name))
        except AdapterNotFoundError:
            assert content is None
            return
        assert unloaded.version == version + 1
        self.note(name, unloaded.version, None)

    @rule(name=NAMES, content=st.none() | CONTENTS, skipped=st.integers(1, 20))
    def edit(self, name, content, skipped):
        version = self.truth.get(name, (0, None))[0] + skipped
        document = {"name": name, "version": version}
        document |= {"removed": True} if content is None else {"uri": content}
        (self.folder / f"{name}.json").write_text(json.dumps(document))
        self.note(name, version, content)
        self.edited.add(name)

    @rule(content=CONTENTS)
    def go_away(self, content):
        self.away.add(content)

    @rule()
    def come_back(self):
        self.away.clear()

    @rule(server=SERVERS)
    def look(self, server):
        self.do(self.servers[server].look())

    @rule(server=SERVERS)
    def restart(self, server):
        self.do(self.servers[server].service.close())
        self.do(self.servers[server].start())

    @rule(server=SERVERS, name=NAMES)
    def request(self, server, name):
        """It runs with a version that was declared, or finds none where none is declared."""
        self.servers[server].clock.advance_seconds(1)
        contents = {content for content in self.declared.get(name, {}).values() if content}
        try:
            digest = self.do(self.servers[server].use(name))
        except ModelNotFoundError:
            assert self.truth.get(name, (0, None))[1] is None
        except LoraplexError:
            assert self.away
        else:
            assert digest in map(digest_of, contents)

    @rule()
    def all_agree(self):
        """After a reading all servers serve the truth, as far as its sources are there."""
        for server in self.servers:
            self.do(server.look())
        for name, (version, content) in self.truth.items():
            for server in self.servers:
                if content is None:
                    try:
                        self.do(server.use(name))
                    except ModelNotFoundError:
                        continue
                    raise AssertionError(f"{name} was removed")
                if content not in self.away:
                    assert self.do(server.use(name)) == digest_of(content)
                    stored = server.store.resolve(AdapterRef("m", "default", ByName(name)))
                    assert stored.number == version

    @invariant()
    def no_server_has_what_was_never_declared(self):
        for server in self.servers:
            for version in server.store.list("default"):
                content = self.declared[version.name][version.number]
                assert content is not None
                assert (version.path, version.digest) == (content, digest_of(content))


TestSharedNames = SharedNamesMachine.TestCase
TestSharedNames.settings = examples(0.2, stateful_step_count=25)
