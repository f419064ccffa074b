"""Scores of a cross-encoder of sentence-transformers, and its evaluator over a server's scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import AutoTokenizer, Qwen3Config

from loraplex import LLM
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes

TEMPLATE = (
    "{%- for message in messages if message.role == 'system' -%}I: {{ message.content }}\n"
    "{% endfor -%}"
    "Q: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "D: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}\n"
    "{%- if add_generation_prompt %}A:{% endif -%}"
)
QUERIES = ["capital of France", "rivers"]
DOCUMENTS = ["Paris is the capital.", "Rome", "The Rhine. " * 9, "Nothing"]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_bytes": 4 << 20,
    "max_num_seqs": 8,
}


@pytest.fixture
def encoder(tmp_path: Path) -> CrossEncoder:
    """Return a cross-encoder that judges by two tokens; its folder is tmp_path/"encoder"."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_PATH)
    sizes = tiny_sizes(len(tokenizer), head_dim=16) | {"max_position_embeddings": 256}
    save_random_model(tmp_path / "base", Qwen3Config(**sizes))
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    transformer = Transformer(
        str(tmp_path / "base"),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    made = CrossEncoder(
        modules=[transformer, LogitScore(true_token_id=40, false_token_id=41)],
        prompts={"query": "be strict"},
        default_prompt_name="query",
        device="cpu",
    )
    made.save_pretrained(str(tmp_path / "encoder"))
    return CrossEncoder(str(tmp_path / "encoder"), device="cpu")


class Served:
    """A model that the evaluator of sentence-transformers calls, whose scores an LLM gives."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.model_card_data = Mock()
        """Where the evaluator stores its numbers."""

    def predict(self, pairs: Sequence[Sequence[str]], **_: Any) -> npt.NDArray[np.float64]:
        queries, documents = zip(*pairs, strict=True)
        return np.array([one.score for one in self._llm.score(queries, documents)])


def test_scores_and_the_evaluator_of_sentence_transformers(
    encoder: CrossEncoder, tmp_path: Path
) -> None:
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    with torch.no_grad():
        expected = encoder.predict(pairs)
    samples = [
        {"query": query, "positive": DOCUMENTS[at : at + 1], "documents": DOCUMENTS}
        for at, query in enumerate(QUERIES)
    ]
    evaluator = CrossEncoderRerankingEvaluator(samples, show_progress_bar=False, write_csv=False)
    wanted = evaluator(encoder)
    with LLM(tmp_path / "encoder", state_dir=tmp_path / "state", **SETTINGS) as llm:
        served = Served(llm)
        found = served.predict(pairs)
        measured: Any = evaluator(served)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert measured == pytest.approx(wanted)
