"""Choice of a replica for a request, by the residency of its adapter and by load.

Free of Ray and torch: the router of Ray Serve (`ray_router`) and the simulation in
benchmarks/routing.py decide by this module.
"""

import bisect
import dataclasses
import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

MAX_RESIDENTS: Final = 4096
"""Maximum number of adapters of one tier that a replica reports: 16 KiB."""
MAX_RECENT: Final = 1024
"""Maximum number of adapters of recent requests that a router remembers for each replica, twice."""
LOAD_COST: Final = 0.125
HOST_COST: Final = 0.0125
"""Costs of an adapter that is on no tier, or on the host only, in lengths of a queue: a queue of
length 1 has as many requests as the replica has slots. So requests of a popular adapter leave a
replica that has it once an eighth as many wait there as it has slots. Higher costs gain no hits in
benchmarks/routing.py, but waits."""
_HOME_SPARE: Final = 1.25
"""An adapter that no replica has goes to its home, unless that has so many times the mean load."""
_KEY_BITS: Final = 32
_GOLDEN: Final = 0x9E3779B1
_MASK: Final = (1 << _KEY_BITS) - 1
_CODE: Final = "I"


def adapter_key(name: str) -> int:
    """Return the number that stands for an adapter's name in reports.

    Two names may share one; the router then sends a request to a replica that has to load its
    adapter.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_KEY_BITS // 8).digest())


class Residents:
    """Compact set of adapters: four bytes for each."""

    def __init__(self, packed: bytes = b"") -> None:
        self._keys = array(_CODE)
        self._keys.frombytes(packed[: MAX_RESIDENTS * self._keys.itemsize])

    @classmethod
    def of(cls, names: Iterable[str]) -> "Residents":
        """Return the set of the first MAX_RESIDENTS names."""
        kept = [adapter_key(name) for _, name in zip(range(MAX_RESIDENTS), names, strict=False)]
        return cls(array(_CODE, sorted(kept)).tobytes())

    def __contains__(self, key: int) -> bool:
        index = bisect.bisect_left(self._keys, key)
        return index < len(self._keys) and self._keys[index] == key

    def __len__(self) -> int:
        return len(self._keys)

    def __bytes__(self) -> bytes:
        return self._keys.tobytes()


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a replica reports to routers, once a period."""

    num_slots: int = 1
    """Maximum number of sequences in one step (max_num_seqs)."""
    num_requests: int = 0
    """Number of running and waiting requests."""
    on_device: bytes = b""
    """Adapters on the device, as `Residents`."""
    on_host: bytes = b""

    def to_stats(self) -> dict[str, Any]:
        """Return the report as builtin types, which every version of Ray can carry."""
        return msgspec.structs.asdict(self)

    @classmethod
    def of_stats(cls, stats: Mapping[str, Any]) -> "ReplicaReport":
        """Return the report in a replica's statistics; an empty one if it has none yet."""
        return msgspec.convert(dict(stats), cls)


@dataclasses.dataclass(slots=True)
class _Replica:
    """What a router knows of a replica."""

    seed: int
    num_slots: int = 1
    num_requests: int = 0
    on_device: Residents = dataclasses.field(default_factory=Residents)
    on_host: Residents = dataclasses.field(default_factory=Residents)
    sent: set[int] = dataclasses.field(default_factory=set)
    """Adapters of requests since the last report; the replica has them by the next one."""
    sent_before: set[int] = dataclasses.field(default_factory=set)
    """The same of the period before: the last report may have been made too early."""

    def take(self, report: ReplicaReport) -> None:
        self.num_slots = max(1, report.num_slots)
        self.num_requests = report.num_requests
        self.on_device, self.on_host = Residents(report.on_device), Residents(report.on_host)
        self._turn()

    def note(self, key: int) -> None:
        self.sent.add(key)
        if len(self.sent) >= MAX_RECENT:
            self._turn()

    def miss_cost(self, key: int) -> float:
        if key in self.sent or key in self.sent_before or key in self.on_device:
            return 0.0
        return HOST_COST if key in self.on_host else LOAD_COST

    def _turn(self) -> None:
        self.sent_before, self.sent = self.sent, set()


class AdapterRouting:
    """Decisions of one router.

    A decision looks at each replica once. Memory is bounded by the number of replicas: at most
    MAX_RESIDENTS adapters of each tier and twice MAX_RECENT for each.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def take_report(self, replica: str, report: ReplicaReport) -> None:
        """Take what a replica reports of itself. A new name is a new replica."""
        known = self._replicas.setdefault(replica, _Replica(adapter_key(replica)))
        known.take(report)

    def keep_only(self, replicas: Collection[str]) -> None:
        """Forget the replicas that are gone."""
        for name in self._replicas.keys() - set(replicas):
            del self._replicas[name]

    def rank(self, adapter: str, loads: Mapping[str, int | None]) -> list[str]:
        """Return the replicas, best first.

        adapter: its name; empty: the base model, which is everywhere. loads: candidates, and the
        number of requests of each as far as the caller knows it; None: as last reported.
        """
        key = adapter_key(adapter) if adapter else None
        known = [self._known(name, load) for name, load in loads.items()]
        slots = sum(replica.num_slots for replica in known)
        mean = sum(replica.num_requests for replica in known) / slots if known else 0.0
        costs = [_cost(replica, key, mean) for replica in known]
        return [name for _, name in sorted(zip(costs, loads, strict=True))]

    def note_sent(self, adapter: str, replica: str) -> None:
        """Note that a request of an adapter went to a replica, which has it from then on."""
        known = self._replicas.get(replica)
        if known is not None:
            known.num_requests += 1
            if adapter:
                known.note(adapter_key(adapter))

    def _known(self, name: str, load: int | None) -> _Replica:
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = _Replica(adapter_key(name))
        if load is not None:
            replica.num_requests = load
        return replica


def _cost(replica: _Replica, key: int | None, mean: float) -> tuple[float, float, int]:
    """Return the cost of a replica for an adapter, and what decides between equal ones.

    Among replicas that have the adapter the one with the least load is best. Among others it is the
    adapter's home, which is the same for all routers, so that it is loaded once.
    """
    load = replica.num_requests / replica.num_slots
    queue = max(0.0, (replica.num_requests + 1) / replica.num_slots - 1.0)
    if key is None:
        return queue, load, replica.seed
    miss = replica.miss_cost(key)
    is_free = miss > 0 and replica.num_requests + 1 <= _HOME_SPARE * (mean * replica.num_slots + 1)
    distance = ((key ^ replica.seed) * _GOLDEN & _MASK) ^ replica.seed
    return queue + miss, 0.0 if is_free else load, distance


def model_and_adapter(name: str, models: Sequence[str]) -> tuple[str, str]:
    """Divide what a request calls its model into base model and adapter.

    An exact name of a base model wins; else `base:adapter` is divided at the first colon after a
    base model's name. Any other name is an adapter's, and the base model is empty.
    """
    if name in models:
        return name, ""
    for model in models:
        if name.startswith(f"{model}:"):
            return model, name.removeprefix(f"{model}:")
    return "", name


_HEADER: Final = b"x-lora-adapter"
_RAYS_HEADER: Final = b"serve_multiplexed_model_id"
_NAMES: Final = ("lora_model", "adapter_id", "lora_path", "lora_name")
MAX_NAME: Final = 256


class _Body(msgspec.Struct):
    model: Any = None
    lora_model: Any = None
    adapter_id: Any = None
    lora_path: Any = None
    lora_name: Any = None
    lora_task_id: Any = None
    parameters: Any = None


_BODY: Final = msgspec.json.Decoder(_Body)


def task_name(task_id: int) -> str:
    """Return the name under which an adapter with a task id is reported."""
    return f"task {task_id}"


def routed_adapter(
    headers: Sequence[tuple[bytes, bytes]], body: bytes, models: Sequence[str]
) -> str:
    """Return the adapter's name without its base model; empty for the base model or if unknown.

    models: names of the served base models.
    """
    for name, value in headers:
        if name in (_HEADER, _RAYS_HEADER) and value:
            return _named(value.decode("latin-1"), models)
    if not body.lstrip().startswith(b"{"):
        return ""
    try:
        read = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    fields = msgspec.structs.asdict(read)
    found = _of_fields(fields, models)
    if not found and isinstance(read.parameters, Mapping):
        found = _of_fields(read.parameters, models)
    return found


def _of_fields(fields: Mapping[str, Any], models: Sequence[str]) -> str:
    for field in _NAMES:
        if isinstance(name := fields.get(field), str) and name:
            return _named(name, models)
    if isinstance(task_id := fields.get("lora_task_id"), int):
        return task_name(task_id)
    model = fields.get("model")
    return _named(model, models) if isinstance(model, str) else ""


def _named(name: str, models: Sequence[str]) -> str:
    return model_and_adapter(name, models)[1][:MAX_NAME]
