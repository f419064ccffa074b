"""GET /v1/memory: what lies where, in bytes and counts, and how many more adapters fit."""

from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory, StoredAdapters


class MemoryReport(ModelMemory, frozen=True, kw_only=True):
    store: StoredAdapters


async def memory_report(backend: Backend, models: list[str]) -> dict[str, MemoryReport]:
    """Return a report for each model. Raises NotReadyError until its engine has started once."""
    return {model: await _of_model(backend, model) for model in models}


async def _of_model(backend: Backend, model: str) -> MemoryReport:
    store = await backend.model(model).stored_adapters()
    await backend.model(model).adapter_activity()  # so that the numbers are of now
    memory = backend.model(model).memory()
    tiers = {name: getattr(memory, name) for name in ModelMemory.__struct_fields__}
    return MemoryReport(**tiers, store=store)
