"""end_to_end_test.py of the TensorRT-LLM backend: `loraplex compat client end-to-end-test`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "end-to-end-test", *sys.argv[1:]], prog_name="loraplex")
