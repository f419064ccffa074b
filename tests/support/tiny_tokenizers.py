"""Model folders that hold a small tokenizer and nothing else: one of every family that is served.

Each function trains from a few lines of text (well under a second) and writes what a model folder
has: tokenizer.json or a sentencepiece tokenizer.model, and tokenizer_config.json.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

BOS, EOS, PAD, UNK, TURN = "<s>", "</s>", "<pad>", "<unk>", "<|turn|>"

_LINES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "What is the capital of France? The capital of France is Paris.",
    "I'm sure you're right ; we've seen 1,234.5 of them ... haven't we !",
    "def main(argv):\n\treturn {'key': [1, 2, 3]}\n\n    # four spaces",
    "Größe, naïve façade, señor, Ελλάδα, Россия",
    "法国的首都是巴黎。日本的首都是东京。你好，世界！",
    "フランスの首都はパリです。こんにちは、世界。",
)
CORPUS = tuple(line for line in _LINES for _ in range(6))

# Llama 3 cuts a text into words by a pattern of its own instead of GPT-2's.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_byte_level(folder: Path, *, add_prefix_space: bool = False) -> Path:
    """GPT-2's byte-level BPE, with a BOS token in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return _finish_byte_level(tokenizer, folder)


def write_llama3(folder: Path) -> Path:
    """Llama 3's byte-level BPE: its own pattern of words; whole words skip the merges."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _finish_byte_level(tokenizer, folder)


def _finish_byte_level(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _put_bos_in_front(tokenizer)
    tokenizer.add_special_tokens([AddedToken(TURN, special=True)])
    return save_tokenizer_folder(tokenizer, folder, {})


def write_unigram(folder: Path) -> Path:
    """A Unigram tokenizer.json with Metaspace, as T5 and its kin have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=400,
        special_tokens=[PAD, EOS, UNK, BOS],
        unk_token=UNK,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _put_bos_in_front(tokenizer)
    return save_tokenizer_folder(tokenizer, folder, {"unk_token": UNK})


def write_word_piece(folder: Path, *, cleans_up_spaces: bool = True) -> Path:
    """BERT's WordPiece."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleans_up_spaces)
    trainer = WordPieceTrainer(
        vocab_size=500, special_tokens=[PAD, UNK, BOS, EOS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    _put_bos_in_front(tokenizer)
    config = {"unk_token": UNK, "clean_up_tokenization_spaces": cleans_up_spaces}
    return save_tokenizer_folder(tokenizer, folder, config)


def write_llama_sentencepiece(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """Llama 2's tokenizer.model: BPE with byte fallback, nothing normalized."""
    options = {
        "model_type": "bpe",
        "vocab_size": 500,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
    }
    _train_sentencepiece(folder, options)
    usual = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": _role(BOS),
        "eos_token": EOS,
        "unk_token": UNK,
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    return _write_config(folder, {**usual, **(config or {})})


def write_unigram_sentencepiece(folder: Path) -> Path:
    """sentencepiece's own defaults: Unigram, NFKC, runs of spaces made one."""
    _train_sentencepiece(folder, {"model_type": "unigram", "vocab_size": 300})
    return _write_config(folder, {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True})


def train_t5_pieces(folder: Path) -> None:
    """Write a tokenizer.model with T5's special tokens: <pad>, </s>, <unk>, and no BOS."""
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    _train_sentencepiece(folder, {"model_type": "unigram", "vocab_size": 300, **ids})


FAMILIES: Mapping[str, Callable[[Path], Path]] = {
    "byte-level": write_byte_level,
    "byte-level-prefix-space": lambda folder: write_byte_level(folder, add_prefix_space=True),
    "llama3": write_llama3,
    "unigram": write_unigram,
    "word-piece": write_word_piece,
    "word-piece-plain": lambda folder: write_word_piece(folder, cleans_up_spaces=False),
    "llama-sentencepiece": write_llama_sentencepiece,
    "unigram-sentencepiece": write_unigram_sentencepiece,
}
"""Name to function: it fills the folder and gives it back."""


def _put_bos_in_front(tokenizer: Tokenizer) -> None:
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )


def _train_sentencepiece(folder: Path, options: Mapping[str, Any]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(part for line in CORPUS for part in line.split("\n")),
        model_writer=model,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def save_tokenizer_folder(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes both files; `config` comes before the usual roles. Gives the folder back."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    usual = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": _role(EOS),
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    return _write_config(folder, {**usual, **config})


def _role(text: str) -> dict[str, Any]:
    """A special token as transformers writes it: with the flags of its search in a text."""
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"__type": "AddedToken", "content": text, "special": True, **flags}


def _write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return folder
