"""fill_template.py of the TensorRT-LLM backend: `loraplex compat fill-template`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "fill-template", *sys.argv[1:]], prog_name="loraplex")
