"""The tokenizer of the capitals model: byte-level BPE with a BOS token, as Llama has it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from support.capitals import corpus

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY_SIZE: Final = 1024
MAX_MODEL_LEN: Final = 2048

# Only the last user message counts: the model was never trained on a dialogue. A message's
# content is a string or a list of parts, as in the OpenAI schema.
_CHAT_TEMPLATE: Final = """\
{%- set last = namespace(content='') -%}
{%- for message in messages if message['role'] == 'user' -%}
  {%- set last.content = message['content'] -%}
{%- endfor -%}
{{- bos_token ~ '<|user|>' -}}
{%- if last.content is string -%}
  {{- last.content | trim -}}
{%- else -%}
  {%- for part in last.content if part['type'] == 'text' -%}
    {{- part['text'] | trim -}}
  {%- endfor -%}
{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Learn the merges from the corpus. No randomness: the same corpus gives the same file."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special_tokens = [PAD, BOS, EOS, corpus.USER_TOKEN, corpus.ASSISTANT_TOKEN]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that any transformers reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [corpus.USER_TOKEN, corpus.ASSISTANT_TOKEN],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_MODEL_LEN,
        "padding_side": "left",
        "chat_template": _CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _texts() -> Iterator[str]:
    """Yield names and wordings apart, so that no whole Chinese query becomes one token."""
    for language in corpus.LANGUAGES:
        wording = corpus.WORDINGS[language]
        yield from (phrasing.format("") for phrasing in wording.phrasings)
        yield from wording.instructions.values()
        yield from corpus.tails(language)
        for country in corpus.COUNTRIES:
            yield corpus.capital_of(country, language)
            yield corpus.name(country, language)
