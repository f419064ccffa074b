"""llama.cpp's convert_lora_to_gguf.py for many adapters in one process: torch is imported once.

    python convert_loras.py SCRIPT BASE OUTTYPE TARGET JOBS

JOBS is a JSON list of [adapter folder, file name]; the files go into the folder TARGET.
"""

import json
import runpy
import sys
from pathlib import Path


def main(script: str, base: str, outtype: str, target: str, encoded_jobs: str) -> None:
    folder = Path(target)
    folder.mkdir()
    # A script that is run by itself can import the files of its own folder.
    sys.path.insert(0, str(Path(script).parent))
    jobs: list[tuple[str, str]] = json.loads(encoded_jobs)
    for adapter, name in jobs:
        sys.argv = [script, "--base", base, "--outtype", outtype]
        sys.argv += ["--outfile", str(folder / name), adapter]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
