"""Model folder with random weights and a tokenizer, which completes any text without meaning."""

from pathlib import Path

from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.tiny_model import TinyCheckpoint


def write_tiny_text_model(
    folder: Path, family: str = "byte-level", *, seed: int = 0, max_model_len: int = 2048
) -> Path:
    """family: one of tiny_tokenizers.FAMILIES."""
    tiny_tokenizers.FAMILIES[family](folder)
    tokenizer = load_tokenizer(folder)
    checkpoint = TinyCheckpoint(
        folder,
        seed=seed,
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,  # as models do: some rows without a token
        max_position_embeddings=max_model_len,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return checkpoint.save()
