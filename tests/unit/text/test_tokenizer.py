"""Our tokenizers against transformers' on the same folders, and against sentencepiece itself."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import google.protobuf.runtime_version
import pytest
import sentencepiece
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from loraplex.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from loraplex.text.sentencepiece_model import (
    Piece,
    PieceType,
    SentencePieceModel,
    build_tokenizer,
)
from loraplex.text.tokenizer import Tokenizer, load_tokenizer
from support import tiny_tokenizers
from support.capitals import tokenizer as capitals
from support.naming import naming
from support.tiny_tokenizers import FAMILIES

TEXTS = (
    "",
    " ",
    "   ",
    "Hello",
    "Hello, world!",
    " Hello",
    "  Hello   world  ",
    "The capital of France is Paris .",
    "I don't think we've met ; haven't we ? I'm sure you 're right !",
    "\n",
    "\n\n\tdef f(x):\n    return x\r\n",
    "法国的首都是巴黎。",
    "フランスの首都はパリです。",
    "Größe naïve e\u0301 a\u0308\u0323 \u1ec7",
    "👨‍👩‍👧‍👦 🇫🇷 👍🏽",
    "བོད་སྐད",
    "العربية עברית",
    "a\u200bb\u00a0c\u3000d\ufeffe",
    "\u0000\u0001\x7f",
    "<s>",
    "<s>Hello</s> world",
    "a <s> b </s>",
    "Hello <|turn|>world<|turn|>\n",
    "<pad><unk><mask>",
    "▁Hello▁world",
    "<0xE4><0x41>",
    "ＦＵＬＬ ｗｉｄｔｈ ﬁ ① ㌀",
    "0123456789 3.14159 1e-5",
    "x" * 300,
)


@pytest.fixture
def reference(monkeypatch):
    """transformers' AutoTokenizer. It reads a tokenizer.model with code that sentencepiece ships,
    which demands a protobuf newer than the gRPC stubs allow; it works with the older one, too."""
    monkeypatch.setattr(
        google.protobuf.runtime_version, "ValidateProtobufRuntimeVersion", lambda *a: None
    )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def assert_equal(ours: Tokenizer, theirs) -> None:
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens) == ids, repr(text)
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip) == expected, repr(text)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    specials = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert {i for i in range(ours.vocab_size) if ours.is_special(i)} == specials


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "unigram-sentencepiece"])
def test_equals_transformers(family, tmp_path, reference):
    folder = FAMILIES[family](tmp_path)
    assert_equal(load_tokenizer(folder), reference(folder))


@pytest.mark.parametrize(
    "config",
    [
        {"legacy": True},
        {"legacy": True, "add_eos_token": True},
        {"legacy": False, "add_bos_token": False},
        {"add_prefix_space": False},
        {
            "added_tokens_decoder": {
                "1": {"content": "<s>", "special": True, "normalized": False, "rstrip": True},
                "40000": {"content": "<|turn|>", "special": False, "lstrip": True},
            }
        },
        {"additional_special_tokens": ["<|turn|>"], "pad_token": "<pad>", "image_token": "<img>"},
    ],
    ids=str,
)
def test_llama_sentencepiece_options_equal_transformers(config, tmp_path, reference):
    folder = tiny_tokenizers.write_llama_sentencepiece(tmp_path, config)
    assert_equal(load_tokenizer(folder), reference(folder))


def test_llama_sentencepiece_converted_to_json(tmp_path, reference):
    folder = tiny_tokenizers.write_llama_sentencepiece(tmp_path / "model")
    theirs = reference(folder)
    theirs.save_pretrained(tmp_path / "json")
    assert not (tmp_path / "json" / "tokenizer.model").exists()
    assert_equal(load_tokenizer(tmp_path / "json"), theirs)


def test_llama_adds_bos_by_default(tmp_path):
    folder = tiny_tokenizers.write_llama_sentencepiece(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Hello")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id is None


@pytest.mark.parametrize("family", ["llama-sentencepiece", "unigram-sentencepiece"])
def test_equals_sentencepiece(family, tmp_path):
    """Texts without special tokens, and without the leading space that transformers merges."""
    folder = FAMILIES[family](tmp_path)
    ours = load_tokenizer(folder)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    plain = [t for t in TEXTS if "<" not in t and not t.startswith((" ", "▁"))]
    assert len(plain) > 15
    for text in plain:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, repr(text)
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), repr(text)


@pytest.mark.parametrize(
    "config",
    [
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {"additional_special_tokens": ["<|extra|>", "France"]},
        {"extra_special_tokens": {"image_token": "<img>"}},
        {"added_tokens_decoder": {"5": {"content": "!", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"900": {"content": "zzz", "lstrip": True, "rstrip": True}}},
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": False}}},
        {
            "added_tokens_decoder": {
                "901": {"content": "yyy", "special": False},
                "900": {"content": "zzz", "special": True},
                "9000": {"content": "www", "special": False},
            },
            "additional_special_tokens": ["yyy"],
        },
        {"mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}},
    ],
    ids=str,
)
def test_json_options_equal_transformers(config, tmp_path, reference):
    folder = tiny_tokenizers.write_byte_level(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert_equal(load_tokenizer(folder), reference(folder))


def test_special_tokens_map_of_the_older_layout(tmp_path, reference):
    folder = tiny_tokenizers.write_byte_level(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    roles = {"eos_token": {"content": "<|turn|>", "lstrip": False}, "pad_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    assert_equal(load_tokenizer(folder), reference(folder))


def test_added_tokens_of_the_older_layout(tmp_path, reference):
    folder = tiny_tokenizers.write_llama_sentencepiece(
        tmp_path, {"additional_special_tokens": ["<|a|>"]}
    )
    size = load_tokenizer(folder).vocab_size - 1
    ids = {"<|b|>": size + 1, "<|a|>": size, "<|c|>": size + 2}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    assert_equal(load_tokenizer(folder), reference(folder))


def test_truncation_and_padding_in_the_file_do_not_count(tmp_path):
    folder = tiny_tokenizers.write_byte_level(tmp_path)
    backend = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    text = "What is the capital of France?"
    ids = tokenizer.encode(text)
    assert 4 < len(ids) < 64
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text


def test_capitals_tokenizer(tmp_path, reference):
    capitals.save_tokenizer(capitals.build_tokenizer(), tmp_path)
    assert_equal(load_tokenizer(tmp_path), reference(tmp_path))


def test_best_score_is_merged_first(tmp_path):
    """Also where ids are not in the order of scores, as in a model with pieces added later."""
    texts = {"\u2581": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -6.0, "bc": -5.0}
    pieces = (Piece("<unk>", type=PieceType.UNKNOWN), *(Piece(t, s) for t, s in texts.items()))
    model = SentencePieceModel(pieces, model_type=2)
    ids = build_tokenizer(model, {"add_prefix_space": False}).encode("abc").ids
    assert [pieces[i].text for i in ids] == ["a", "bc"]


def test_model_without_bos_and_eos(tmp_path):
    options = {"model_type": "bpe", "vocab_size": 200, "bos_id": -1, "eos_id": -1}
    tiny_tokenizers._train_sentencepiece(tmp_path, options)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is None
    assert tokenizer.encode("The fox") == tokenizer.encode("The fox", add_special_tokens=False)


def test_token_bytes_add_up_to_the_text(tmp_path):
    for family in ("byte-level", "llama3", "llama-sentencepiece"):
        tokenizer = load_tokenizer(FAMILIES[family](tmp_path / family))
        text = "Größe 法国 👨‍👩‍👧 བོད don't"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text


def test_token_bytes_of_byte_tokens(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_llama_sentencepiece(tmp_path))
    ids = tokenizer.encode("བ", add_special_tokens=False)[1:]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xe0", b"\xbd", b"\x96"]
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.decode(ids[:2]) == "\ufffd\ufffd"


def test_a_run_of_byte_tokens_is_valid_as_a_whole_or_not_at_all(tmp_path):
    """Decode a broken run as transformers does; it spoils nothing else."""
    tokenizer = load_tokenizer(tiny_tokenizers.write_llama_sentencepiece(tmp_path))
    ids = tokenizer.encode("བོ", add_special_tokens=False)[1:]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "བོ"
    assert tokenizer.decode(ids[:-1]) == "\ufffd" * 5
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.decode([*ids[:3], *hello, *ids[:2]]).split() == ["བ", "Hello\ufffd\ufffd"]


def test_ids_without_a_token_are_nothing(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))
    beyond = tokenizer.vocab_size
    assert tokenizer.token_bytes(beyond) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(beyond) == ""
    assert not tokenizer.is_special(beyond)
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.decode([beyond, *ids, beyond + 7]) == "Hello"


def test_special_token_text(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"
    assert tokenizer.is_special(tokenizer.eos_token_id)
    assert not tokenizer.is_special(tokenizer.encode("a")[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_has_the_same_tokens(family, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(FAMILIES[family](tmp_path))
    usual = [tokenizer.encode(text, adds) for text in TEXTS for adds in (True, False)]
    monkeypatch.setattr("loraplex.text.tokenizer._SHORT_CHARACTERS", -1)
    assert [tokenizer.encode(text, adds) for text in TEXTS for adds in (True, False)] == usual


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path):
    """`Tokenizer.encode` of the library holds the interpreter's lock for seconds."""
    tokenizer = load_tokenizer(FAMILIES["llama3"](tmp_path))

    def num_turns():
        count = 0
        with ThreadPoolExecutor(1) as pool:
            encoding = pool.submit(tokenizer.encode, "\u0301" * 200_000)
            while not encoding.done():
                count += 1
                time.sleep(1e-4)
        return count

    # One or two if the lock is held, however fast the machine is.
    assert any(num_turns() > 20 for _ in range(50))


def test_lone_surrogate_is_refused(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"character 2 .* U\+D800"):
        tokenizer.encode("ab\ud800")


def test_threads_agree(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_llama3(tmp_path))
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        rounds = [list(pool.map(tokenizer.encode, TEXTS)) for _ in range(5)]
        texts = list(pool.map(tokenizer.decode, expected))
    assert all(ids == expected for ids in rounds)
    assert texts == [tokenizer.decode(ids) for ids in expected]


# ------------------------------------------------------------------ what is refused


def bad_folders(tmp_path) -> Iterator[tuple[object, str]]:
    yield tmp_path / "absent", "no model folder"
    empty = tmp_path / "empty"
    empty.mkdir()
    yield empty, "tokenizer.json, a sentencepiece tokenizer.model"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text('{"model": 1}')
    yield broken, "cannot be read as a tokenizer"
    config = tiny_tokenizers.write_byte_level(tmp_path / "config")
    (config / "tokenizer_config.json").write_text("[1]")
    yield config, "must hold a JSON object, not list"
    no_json = tiny_tokenizers.write_byte_level(tmp_path / "no_json")
    (no_json / "tokenizer_config.json").write_text("{")
    yield no_json, "cannot be read as JSON"
    tokens = tiny_tokenizers.write_byte_level(tmp_path / "tokens")
    (tokens / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    yield tokens, "special tokens .* not understood"


def test_bad_folders(tmp_path):
    for folder, message in bad_folders(tmp_path):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff", b"\x0a\x03abc", b"\x0f", b"\xff" * 20, b"\x12\x00"],
)
def test_files_that_are_no_sentencepiece_model(data, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ConfigError, match=naming("tokenizer.json")):
        load_tokenizer(tmp_path)


def test_character_model_is_refused(tmp_path):
    tiny_tokenizers._train_sentencepiece(tmp_path, {"model_type": "char", "vocab_size": 60})
    with pytest.raises(UnsupportedModelError, match=naming("BPE")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder", [decoders.CTC(), decoders.BPEDecoder(), decoders.Strip(" ", 0, 1)], ids=str
)
def test_decoders_that_look_ahead_are_refused(decoder, tmp_path):
    backend = BackendTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match=naming("ByteLevel", "ByteFallback")):
        load_tokenizer(tmp_path)


def test_without_decoder_words_are_joined_by_spaces(tmp_path, reference):
    backend = BackendTokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    theirs = reference(tmp_path)
    assert load_tokenizer(tmp_path).decode([0, 1, 2, 0]) == theirs.decode([0, 1, 2, 0]) == "a b ? a"
