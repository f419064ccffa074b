"""A model whose layers mostly have a short window holds a small part of a whole KV cache."""

import contextlib
import http.client
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loraplex.testing.running_server import running
from support import tiny_tokenizers
from support.eventually import eventually
from support.tiny_model import TinyCheckpoint
from support.triton_repositories import local_flags

pytestmark = pytest.mark.slow

CONTEXT = 8192
PERIOD, NUM_LAYERS = 6, 12


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Layers as those of a Gemma 3: five with a window of 1,024, then one without."""
    folder = tmp_path / "gemma"
    folder.mkdir()
    tiny_tokenizers.FAMILIES["byte-level"](folder)
    checkpoint = TinyCheckpoint(
        folder,
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=NUM_LAYERS,
        sliding_window=1024,
        sliding_window_pattern=PERIOD,
        head_dim=8,
        vocab_size=512,
        max_position_embeddings=2 * CONTEXT,
    )
    return checkpoint.save()


def test_windows_hold_less_than_two_fifths_at_8k(gemma: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loraplex", "serve", str(gemma)]
    with running([*command, *local_flags(tmp_path / "state")]) as server:

        def memory() -> dict[str, Any]:
            status, text = server.get("/v1/memory")
            assert status == 200
            kv: dict[str, Any] = json.loads(text)["gemma"]["kv"]
            return kv

        def num_held() -> int:
            """Positions that the layers without a window hold."""
            nonlocal kv
            kv = memory()
            (whole,) = (group for group in kv["groups"] if group["attention_window"] is None)
            return int(whole["held"]) * int(kv["block_tokens"])

        kv: dict[str, Any] = {}
        body = {"model": "gemma", "prompt": [7] * CONTEXT, "max_tokens": 4096, "ignore_eos": True}

        def complete() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server ends first
                server.post("/v1/completions", body)

        threading.Thread(target=complete, daemon=True).start()
        assert any(eventually(lambda: num_held() >= CONTEXT) for _ in range(6))
        layers = {None: NUM_LAYERS // PERIOD, 1024: NUM_LAYERS - NUM_LAYERS // PERIOD}
        held = sum(group["held"] * layers[group["attention_window"]] for group in kv["groups"])
        (whole,) = (group["held"] for group in kv["groups"] if group["attention_window"] is None)
        assert held < 0.4 * whole * NUM_LAYERS
