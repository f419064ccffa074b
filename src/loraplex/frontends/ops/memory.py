"""GET /v1/memory: what lies where, in bytes and counts, and how many more adapters fit."""

from typing import Any

import msgspec

from loraplex.serving.backend import Backend


async def memory_report(backend: Backend, models: list[str]) -> dict[str, Any]:
    """By model. Raises NotReadyError while one was never there."""
    return {model: await _of_model(backend, model) for model in models}


async def _of_model(backend: Backend, model: str) -> dict[str, Any]:
    store = await backend.stored_adapters(model)
    await backend.adapter_activity(model)  # so that the numbers are of now
    report: dict[str, Any] = msgspec.to_builtins(backend.memory(model))
    return {**report, "store": msgspec.to_builtins(store)}
