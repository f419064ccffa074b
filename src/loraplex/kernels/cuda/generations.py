"""What generation of GPU a device is of, as far as the kernels' tiles differ."""

import torch

_HOPPER = (9, 0)


def keeps_products_in_registers(device: torch.device) -> bool:
    """Before Hopper, what products read comes through registers: large tiles do not fit there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < _HOPPER
