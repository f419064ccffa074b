"""Names of a model's modules, as torch gives them."""

import re
from typing import Final

_WRAPPERS: Final = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\\?\."
)


def without_wrappers(name: str) -> str:
    """Return a name, or a pattern of names, without the parts that torch's wrappers add.

    They are those of DDP, torch.compile, FSDP and activation checkpointing, which may wrap the
    whole model or each layer.
    """
    return _WRAPPERS.sub("", name)
