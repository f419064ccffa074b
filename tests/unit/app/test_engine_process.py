"""The start of an engine's process."""

import subprocess
import sys


def test_torch_is_imported_once_serving_has_sent_what_to_start():
    command = [sys.executable, "-X", "importtime", "-m", "loraplex.app.engine_process", "info"]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
    )
    imported = {line.split(b"|")[-1].strip() for line in ended.stderr.splitlines()}
    assert b"loraplex.engine.process" in imported
    assert not {b"torch", b"loraplex.app.engine"} & imported
