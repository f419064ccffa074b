"""hf_lora_convert.py of TensorRT-LLM: `loraplex compat convert-lora`, overwrites."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "convert-lora", "--force", *sys.argv[1:]], prog_name="loraplex")
