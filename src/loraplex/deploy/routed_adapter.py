"""The adapter that a request names, as far as its router has to know it.

A wrong one costs a load of an adapter, never a wrong result: the replica reads the request itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.deploy.routing import model_and_adapter

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
