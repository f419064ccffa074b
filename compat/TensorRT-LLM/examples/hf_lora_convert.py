"""hf_lora_convert.py of TensorRT-LLM: `loraplex convert-lora`; it overwrites, as the original."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["convert-lora", "--force", *sys.argv[1:]], prog_name="loraplex")
