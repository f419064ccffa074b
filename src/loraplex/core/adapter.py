"""How an adapter is referred to, before and after its name is resolved.

A client says a name, a task id or a digest. The store turns that into a digest, which is the
adapter's only identity: everything below serving knows digests and the handles made from them.
"""

import enum

import msgspec

MAX_TASK_ID = 2**64 - 1

AdapterHandle = int
"""The engine's own number for a digest; never reused while the engine lives."""


class ByName(msgspec.Struct, frozen=True, tag="name"):
    name: str


class ByTaskId(msgspec.Struct, frozen=True, tag="task_id"):
    """A client's integer id: uint64, 0 allowed."""

    task_id: int


class ByDigest(msgspec.Struct, frozen=True, tag="digest"):
    digest: str


AdapterKey = ByName | ByTaskId | ByDigest


class AdapterRef(msgspec.Struct, frozen=True):
    """What a client means. Two tenants' adapters of one name are two adapters."""

    model: str
    tenant: str
    key: AdapterKey

    def __str__(self) -> str:
        match self.key:
            case ByName(name):
                return f"adapter {name!r}"
            case ByTaskId(task_id):
                return f"LoRA task {task_id}"
            case ByDigest(digest):
                return f"adapter with digest {digest}"


class AdapterChoice(msgspec.Struct, frozen=True):
    """One adapter of a request and how strongly it is applied."""

    key: AdapterKey
    scale: float = 1.0


class AdapterUse(msgspec.Struct, frozen=True):
    """A resolved choice: what the engine is told."""

    digest: str
    scale: float = 1.0


class LoraTarget(msgspec.Struct, frozen=True, order=True):
    """One adapted linear layer, as the page arithmetic sees it."""

    layer: int
    module: str
    rank: int
    in_features: int
    out_features: int


class AdapterSource(msgspec.Struct, frozen=True):
    """A staged adapter: where the engine finds its normal file, and its size."""

    digest: str
    path: str
    num_bytes: int
    """Bytes of the tensors once they are in host memory."""
    targets: tuple[LoraTarget, ...]


class Residency(enum.StrEnum):
    """Where an adapter is, in one engine."""

    ABSENT = "absent"
    LOADING = "loading"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"
    FAILED = "failed"
