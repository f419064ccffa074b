"""extract_lora.py of llgtrt: `loraplex compat extract-lora`; it overwrites, as the original."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "extract-lora", "--force", *sys.argv[1:]], prog_name="loraplex")
