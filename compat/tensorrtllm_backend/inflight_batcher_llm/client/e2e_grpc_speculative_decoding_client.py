"""e2e_grpc_speculative_decoding_client.py of the TensorRT-LLM backend: `loraplex compat client
speculative-decoding`.
"""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "speculative-decoding", *sys.argv[1:]], prog_name="loraplex")
