"""Whether an adapter can be served by a model at all: shapes, ranks, the size of each tier."""

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.target_check import check_targets
from loraplex.core.adapter import AdapterSource
from loraplex.core.config import ModelConfig
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.plan import Capacity
from loraplex.memory.adapter_pages import place


def check_room(source: AdapterSource, config: ModelConfig, capacity: Capacity) -> None:
    """Raise AdapterTooLargeError for what would not even fit alone, in either tier."""
    if source.num_bytes > config.lora_host_bytes:
        raise AdapterTooLargeError(
            f"the adapter has {source.num_bytes} bytes, the host cache for adapters "
            f"{config.lora_host_bytes}; raise lora_host_bytes"
        )
    num_pages = place(source.targets, capacity.page_geometry).num_pages
    if num_pages > capacity.num_adapter_pages:
        raise AdapterTooLargeError(
            f"the adapter needs {num_pages} pages of {capacity.adapter_page_bytes} bytes on the "
            f"device, whose pool has {capacity.num_adapter_pages}; raise lora_device_bytes"
        )


def check_base(source: AdapterSource, shapes: BaseShapes, max_rank: int) -> None:
    """What staging checks, for an adapter that was staged for an earlier server of this name.

    Raises AdapterMismatchError or AdapterTooLargeError.
    """
    check_targets(source.targets, shapes, max_rank)
