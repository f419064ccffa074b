"""Check that an adapter fits each tier of a model."""

from loraplex.core.adapter import AdapterSource
from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.config import ModelConfig
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.plan import Capacity
from loraplex.memory.adapter_pages import most_pages


def check_fits_tiers(source: AdapterSource, config: ModelConfig, capacity: Capacity) -> None:
    """Raise AdapterTooLargeError for an adapter that would not fit even alone in a tier."""
    if source.num_bytes > config.lora_host_bytes:
        raise AdapterTooLargeError(
            f"the adapter takes {readable_bytes(source.num_bytes)}, and the host cache for "
            f"adapters has {readable_bytes(config.lora_host_bytes)}; raise lora_host_bytes to "
            f"{enough_bytes(source.num_bytes)} or more"
        )
    pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
    if pages > capacity.num_adapter_pages:
        raise AdapterTooLargeError(
            f"the adapter needs {pages} pages of {readable_bytes(capacity.adapter_page_bytes)} on "
            f"the device, whose pool has {capacity.num_adapter_pages}; raise lora_device_bytes to "
            f"{enough_bytes(pages * capacity.adapter_page_bytes)} or more"
        )
