"""Check that an adapter fits each tier of a model."""

from loraplex.core.adapter import AdapterSource
from loraplex.core.config import ModelConfig
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.plan import Capacity
from loraplex.memory.adapter_pages import most_pages


def check_fits_tiers(source: AdapterSource, config: ModelConfig, capacity: Capacity) -> None:
    """Raise AdapterTooLargeError for an adapter that would not fit even alone in a tier."""
    if source.num_bytes > config.lora_host_bytes:
        raise AdapterTooLargeError(
            f"the adapter has {source.num_bytes} bytes, the host cache for adapters "
            f"{config.lora_host_bytes}; raise lora_host_bytes"
        )
    pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
    if pages > capacity.num_adapter_pages:
        raise AdapterTooLargeError(
            f"the adapter needs {pages} pages of {capacity.adapter_page_bytes} bytes on the "
            f"device, whose pool has {capacity.num_adapter_pages}; raise lora_device_bytes"
        )
