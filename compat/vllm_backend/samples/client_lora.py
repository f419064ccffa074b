"""client_lora.py of the vLLM backend: `loraplex compat client client-lora`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "client-lora", *sys.argv[1:]], prog_name="loraplex")
