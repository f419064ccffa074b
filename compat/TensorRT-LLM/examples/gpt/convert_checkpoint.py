"""convert_checkpoint.py of TensorRT-LLM: `loraplex convert-checkpoint`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["convert-checkpoint", *sys.argv[1:]], prog_name="loraplex")
