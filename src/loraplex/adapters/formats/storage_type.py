"""Element types of exported weights. Free of numpy, since the command line imports it."""

import enum


class StorageType(enum.StrEnum):
    """Element type, named as in hf_lora_convert.py."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
