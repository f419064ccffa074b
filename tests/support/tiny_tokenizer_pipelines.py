"""Small tokenizer.json files with the pipelines of model families, in addition to tiny_tokenizers.

Each has a family's own normalizer, splits, decoder and kinds of added tokens; the vocabulary is
trained from a few lines.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from loraplex.text.sentencepiece_model import build_tokenizer, read_sentencepiece_model
from support.tiny_tokenizers import (
    BOS,
    CORPUS,
    EOS,
    PAD,
    UNK,
    save_tokenizer_folder,
    write_llama_sentencepiece,
)

_SPACE = "\u2581"

_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def write_qwen2(folder: Path) -> Path:
    """NFC; single digits; no BOS; tokens for tools that are no special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    _split_by(tokenizer, _QWEN_WORDS)
    _train_byte_level(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>", "<think>")]
    )
    config = {
        **_ROLES_OF_NONE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
    }
    return save_tokenizer_folder(tokenizer, folder, config)


def write_tekken(folder: Path) -> Path:
    """Mistral's tekken: words split by case; BOS by a template; [INST] and similar markers."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    _split_by(tokenizer, _TEKKEN_WORDS)
    _train_byte_level(tokenizer, [UNK, BOS, EOS, "[INST]", "[/INST]", "[TOOL_CALLS]"])
    _frame(tokenizer, before=BOS)
    return save_tokenizer_folder(tokenizer, folder, {"unk_token": UNK})


def write_deepseek(folder: Path) -> Path:
    """Three splits, one after the other; special tokens of characters that are not ASCII."""
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    _split_by(tokenizer, *_DEEPSEEK_SPLITS)
    _train_byte_level(tokenizer, [bos, eos])
    tokenizer.add_tokens([AddedToken("<｜User｜>", normalized=False), AddedToken("é")])
    _frame(tokenizer, before=bos)
    config = {
        "bos_token": {"__type": "AddedToken", "content": bos, "special": True},
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return save_tokenizer_folder(tokenizer, folder, config)


def write_falcon(folder: Path) -> Path:
    """Punctuation and runs of three digits apart; roles written as words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )
    _train_byte_level(tokenizer, [">>TITLE<<", "<|endoftext|>"])
    roles = {**_ROLES_OF_NONE, "eos_token": "<|endoftext|>", "pad_token": None}
    return save_tokenizer_folder(tokenizer, folder, roles)


def write_llama2_json(folder: Path, *, legacy: bool = True) -> Path:
    """Llama 2's converted file. `legacy`: a space before each piece of text, by the normalizer;
    else only at the start of the text."""
    tokenizer = _of_sentencepiece(folder)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
        tokenizer.pre_tokenizer = None
    _frame(tokenizer, before=BOS)
    return save_tokenizer_folder(tokenizer, folder, {"unk_token": UNK, "legacy": legacy})


def write_phi3(folder: Path) -> Path:
    """Llama 2's tokenizer, with markers that include the white space after them."""
    write_llama2_json(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = ("<|end|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(text, rstrip=True) for text in markers])
    config = {"unk_token": UNK, "eos_token": "<|end|>", "add_bos_token": False}
    return save_tokenizer_folder(tokenizer, folder, {**config, "add_eos_token": False})


def write_gemma(folder: Path) -> Path:
    """No space in front; runs of spaces and of line ends are tokens; byte fallback."""
    tokenizer = _of_sentencepiece(folder)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    runs = [_SPACE * length for length in range(2, 6)] + ["\n\n", "\n\n\n", "\t\t"]
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    tokenizer.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    _frame(tokenizer, before=BOS)
    return save_tokenizer_folder(tokenizer, folder, {"unk_token": UNK})


PIPELINES: Mapping[str, Callable[[Path], Path]] = {
    "qwen2": write_qwen2,
    "mistral-tekken": write_tekken,
    "deepseek": write_deepseek,
    "falcon": write_falcon,
    "llama2-legacy": write_llama2_json,
    "llama2-metaspace": lambda folder: write_llama2_json(folder, legacy=False),
    "phi3": write_phi3,
    "gemma": write_gemma,
}
"""Name to function: it fills the folder and gives it back."""

BYTE_FALLBACK = frozenset(("llama2-legacy", "llama2-metaspace", "phi3", "gemma"))
"""Those with tokens of single bytes."""

_ROLES_OF_NONE: Mapping[str, Any] = {"bos_token": None, "unk_token": None}


def _split_by(tokenizer: Tokenizer, *patterns: str) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])


def _train_byte_level(tokenizer: Tokenizer, special_tokens: list[str]) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)


def _of_sentencepiece(folder: Path) -> Tokenizer:
    write_llama_sentencepiece(folder)
    model = folder / "tokenizer.model"
    tokenizer = build_tokenizer(read_sentencepiece_model(model), {"legacy": False})
    model.unlink()
    tokenizer.add_special_tokens([PAD])
    return tokenizer


def _frame(tokenizer: Tokenizer, *, before: str) -> None:
    tokenizer.post_processor = TemplateProcessing(
        single=f"{before} $A", special_tokens=[(before, tokenizer.token_to_id(before))]
    )


def with_config(folder: Path, **entries: Any) -> Path:
    """The folder, its tokenizer_config.json with these entries, too."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
