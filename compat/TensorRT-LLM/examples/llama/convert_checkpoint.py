"""convert_checkpoint.py of TensorRT-LLM: `loraplex compat convert-checkpoint`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "convert-checkpoint", *sys.argv[1:]], prog_name="loraplex")
