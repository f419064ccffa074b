"""launch_triton_server.py of the TensorRT-LLM backend: `loraplex compat launch-triton-server`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "launch-triton-server", *sys.argv[1:]], prog_name="loraplex")
