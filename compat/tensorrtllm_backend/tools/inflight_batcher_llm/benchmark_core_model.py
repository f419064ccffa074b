"""benchmark_core_model.py of the TensorRT-LLM backend: `loraplex client benchmark-core-model`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["client", "benchmark-core-model", *sys.argv[1:]], prog_name="loraplex")
