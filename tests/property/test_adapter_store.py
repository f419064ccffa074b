"""Whatever is registered, replaced, rolled back, forgotten and collected, the store keeps its word.

A shadow in plain dictionaries holds what every name must mean. After every step the store is
compared with it, and after every reopening; the files on the disk are compared after a collection.
"""

import contextlib
import dataclasses
import hashlib
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import MAX_HISTORY, AdapterStore, VersionOrigin
from loraplex.core.adapter import AdapterRef, AdapterSource, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterExistsError, AdapterLoadError, AdapterNotFoundError
from support.examples import examples

NAMES = st.sampled_from(["cats", "dogs", "etc/passwd", "b: '; DROP TABLE adapters"])
ALIASES = st.sampled_from(["live", "cats", "pets", "etc/passwd"])
CONTENTS = st.sampled_from([hashlib.sha256(bytes([i])).hexdigest() for i in range(5)])
TASK_IDS = st.sampled_from([None, 0, 1, 2**64 - 1])
CONFIGURATIONS = st.dictionaries(NAMES, TASK_IDS, max_size=2).filter(
    lambda task_ids: None in task_ids.values() or len({*task_ids.values()}) == len(task_ids)
)
OWNER = ("m", "t")


@dataclasses.dataclass
class ShadowVersion:
    number: int
    digest: str
    path: str
    restored: int | None = None
    is_pinned: bool = False


@dataclasses.dataclass
class ShadowAdapter:
    task_id: int | None
    origin: VersionOrigin
    history: list[ShadowVersion]
    """The newest first."""

    @property
    def present(self):
        return self.history[0]

    def put(self, version):
        self.history.insert(0, version)
        self.trim()

    def trim(self):
        self.history = [
            version
            for i, version in enumerate(self.history)
            if i < MAX_HISTORY or version.is_pinned
        ]

    def before(self):
        below = self.present.restored or self.present.number
        for version in self.history:
            if version.number < below and version.digest != self.present.digest:
                return version
        return None


class AdapterStoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.state_dir = self.folder / "state"
        self.store = AdapterStore.open(self.state_dir)
        self.adapters = {}
        self.aliases = {}
        self.lost = set()
        """Digests whose file was found to be gone."""
        self.num_paths = 0

    def teardown(self):
        self.store.close()
        assert [path.name for path in self.folder.iterdir()] == ["state"]
        shutil.rmtree(self.folder)

    @initialize(number=st.sampled_from([1, MAX_HISTORY]), is_pinned=st.booleans())
    def start_with_a_history(self, number, is_pinned):
        for i in range(number):
            digest = hashlib.sha256(b"start %d" % i).hexdigest()
            self.register("cats", digest, None, replace=True)
        self.set_pinned("cats", self.adapters["cats"].history[-1], is_pinned)

    @rule(
        name=NAMES,
        digest=CONTENTS,
        task_id=TASK_IDS,
        replace=st.booleans(),
        origin=st.sampled_from(VersionOrigin),
    )
    def register(self, name, digest, task_id, replace, origin=VersionOrigin.API):
        self.write_file(digest)
        self.num_paths += 1
        path = f"/adapters/{self.num_paths}"
        if not self.is_free(name, task_id, replace):
            for attempt in (self.try_register, self.try_check):
                assert attempt(name, digest, path, task_id, replace, origin) is None
            return
        registration = self.try_register(name, digest, path, task_id, replace, origin)
        adapter = self.adapters.get(name)
        if adapter is None:
            self.adapters[name] = ShadowAdapter(task_id, origin, [ShadowVersion(1, digest, path)])
        else:
            adapter.task_id = adapter.task_id if task_id is None else task_id
            adapter.origin = origin
            if adapter.present.digest == digest:
                adapter.present.path = path
                assert registration.is_unchanged
                self.lost.discard(digest)
                return
            adapter.put(ShadowVersion(adapter.present.number + 1, digest, path))
        assert not registration.is_unchanged
        self.lost.discard(digest)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted([*self.adapters, *self.aliases])))
        task_id = self.adapters[name].task_id if name in self.adapters else None
        by_task = task_id is not None and data.draw(st.booleans())
        self.store.remove(ref(ByTaskId(task_id) if by_task else ByName(name)))
        if self.aliases.pop(name, None) is None:
            del self.adapters[name]
            self.aliases = {a: of for a, of in self.aliases.items() if of != name}

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), alias=ALIASES, replace=st.booleans())
    def alias(self, data, alias, replace):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        is_free = alias not in self.adapters and (replace or self.aliases.get(alias, name) == name)
        try:
            self.store.alias(ref(ByName(name)), alias, replace=replace)
        except AdapterExistsError:
            assert not is_free
        else:
            assert is_free
            self.aliases[alias] = name

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), times=st.integers(1, 3))
    def roll_back_in_order(self, data, times):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        for _ in range(times):
            self.roll_back(name, None, self.adapters[name].before())

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def roll_back_to_a_number(self, data):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        target = data.draw(st.sampled_from(self.adapters[name].history))
        self.roll_back(name, target.number, target)

    def roll_back(self, name, number, target):
        adapter = self.adapters[name]
        present = adapter.present
        try:
            version = self.store.rollback(ref(ByName(name)), number)
        except AdapterNotFoundError:
            assert target is None
            return
        except AdapterLoadError:
            assert not self.has_file(target.digest)
            return
        if target.digest == present.digest:
            assert version.number == present.number
            return
        restored = target.restored or target.number
        adapter.put(ShadowVersion(present.number + 1, target.digest, target.path, restored))
        adapter.origin = VersionOrigin.API
        self.lost.discard(target.digest)

    @precondition(lambda self: self.adapters)
    @rule(data=st.data(), is_pinned=st.booleans())
    def pin_or_unpin(self, data, is_pinned):
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        version = data.draw(st.sampled_from(self.adapters[name].history))
        self.set_pinned(name, version, is_pinned)

    def set_pinned(self, name, version, is_pinned):
        change = self.store.pin if is_pinned else self.store.unpin
        assert change(ref(ByName(name)), version.number).is_pinned == is_pinned
        version.is_pinned = is_pinned
        self.adapters[name].trim()

    @rule(task_ids=CONFIGURATIONS)
    def configure(self, task_ids):
        self.store.apply_configuration(*OWNER, task_ids)
        wanted = {task_id for task_id in task_ids.values() if task_id is not None}
        for name in task_ids:
            self.aliases.pop(name, None)
        for name, adapter in list(self.adapters.items()):
            if adapter.origin is VersionOrigin.CONFIGURED and name not in task_ids:
                del self.adapters[name]
                self.aliases = {a: of for a, of in self.aliases.items() if of != name}
            elif name in task_ids:
                if adapter.task_id != task_ids[name]:
                    adapter.task_id = None
            elif adapter.task_id in wanted:
                adapter.task_id = None

    @rule(data=st.data())
    def collect_garbage(self, data):
        in_use = data.draw(st.sets(CONTENTS, max_size=2))
        on_disk = self.digests_on_disk()
        needed = self.digests_in_histories() | in_use
        self.store.collect_garbage(in_use, 0)
        assert self.digests_on_disk() == on_disk & needed

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def lose_a_file(self, data):
        digest = data.draw(st.sampled_from(sorted(self.digests_in_histories())))
        canonical_path(self.state_dir, digest).unlink(missing_ok=True)
        missing = {version.digest for version in self.store.missing()}
        self.lost = {d for d in self.present_digests() if not self.has_file(d)}
        assert missing == self.lost

    @rule()
    def reopen(self):
        self.store.close()
        self.store = AdapterStore.open(self.state_dir)
        self.lost = {d for d in self.present_digests() if not self.has_file(d)}

    @invariant()
    def names_mean_what_they_should(self):
        reported = self.store.list("t", "m")
        assert [v.name for v in reported] == sorted(self.adapters)
        for version in reported:
            adapter = self.adapters[version.name]
            shadow = adapter.present
            assert same(version, shadow)
            assert (version.task_id, version.origin) == (adapter.task_id, adapter.origin)
            assert version.source.path == str(canonical_path(self.state_dir, shadow.digest))
            self.check_resolves(ByName(version.name), version)
            if version.task_id is not None:
                self.check_resolves(ByTaskId(version.task_id), version)
        for digest in self.present_digests() - self.lost:
            assert self.store.resolve(ref(ByDigest(digest))).digest == digest

    @invariant()
    def aliases_mean_what_they_should(self):
        assert self.store.aliases("t", "m") == self.aliases
        for alias, name in self.aliases.items():
            version = next(v for v in self.store.list("t") if v.name == name)
            self.check_resolves(ByName(alias), version)

    @invariant()
    def histories_are_whole(self):
        for name, adapter in self.adapters.items():
            history = self.store.history(ref(ByName(name)))
            assert len(history) == len(adapter.history)
            assert all(map(same, history, adapter.history))

    @invariant()
    def what_is_gone_is_not_found(self):
        free_ids = {0, 1, 2**64 - 1} - {a.task_id for a in self.adapters.values()}
        for key in [ByTaskId(task_id) for task_id in free_ids] + [ByDigest("f" * 64)]:
            with contextlib.suppress(AdapterNotFoundError):
                raise AssertionError(self.store.resolve(ref(key)))

    def check_resolves(self, key, version):
        try:
            assert self.store.resolve(ref(key)) == version
        except AdapterLoadError:
            assert version.digest in self.lost
        else:
            assert version.digest not in self.lost

    def is_free(self, name, task_id, replace):
        holders = {a.task_id: n for n, a in self.adapters.items() if a.task_id is not None}
        return (
            (replace or name not in self.adapters)
            and name not in self.aliases
            and holders.get(task_id, name) == name
        )

    def try_register(self, name, digest, path, task_id, replace, origin):
        source = AdapterSource(digest, str(canonical_path(self.state_dir, digest)), 1, ())
        adapter = StagedAdapter(source=source, dtypes=("F32",), num_tensors=1)
        try:
            return self.store.register(
                *OWNER, name, adapter, path=path, task_id=task_id, replace=replace, origin=origin
            )
        except AdapterExistsError:
            return None

    def try_check(self, name, digest, path, task_id, replace, origin):
        try:
            self.store.check_free(*OWNER, name, task_id, replace=replace)
        except AdapterExistsError:
            return None
        return True

    def write_file(self, digest):
        path = canonical_path(self.state_dir, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def has_file(self, digest):
        return canonical_path(self.state_dir, digest).is_file()

    def digests_on_disk(self):
        return {path.stem for path in self.state_dir.glob("adapters/*/*")}

    def digests_in_histories(self):
        return {v.digest for adapter in self.adapters.values() for v in adapter.history}

    def present_digests(self):
        return {adapter.present.digest for adapter in self.adapters.values()}


def same(version, shadow):
    fields = ("number", "digest", "path", "restored", "is_pinned")
    return all(getattr(version, field) == getattr(shadow, field) for field in fields)


def ref(key):
    return AdapterRef(*OWNER, key)


TestAdapterStore = AdapterStoreMachine.TestCase
TestAdapterStore.settings = examples(0.4, stateful_step_count=40)
