"""build.py of older TensorRT-LLM examples: `loraplex compat build`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "build", *sys.argv[1:]], prog_name="loraplex")
