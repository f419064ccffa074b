"""The element types of exported weights. Free of numpy: the command line names them."""

import enum


class StorageType(enum.StrEnum):
    """As hf_lora_convert.py calls it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
