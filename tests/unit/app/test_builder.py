"""What serving knows of a model before its engine starts."""

import json
import shutil

import msgspec
import pytest

from loraplex.app.builder import build_service, served_shapes
from loraplex.app.model_settings import with_local_paths
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from loraplex.core.server_config import ServerConfig
from loraplex.demo import BASE_PATH
from loraplex.models.registry import read_config
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.fake_engine_process import fake_engine_thread
from support.naming import naming, refused


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped model without its weights, to be changed."""
    shutil.copytree(BASE_PATH, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


@pytest.fixture
def build(folder, tmp_path):
    def build_with(**fields):
        config = Config(
            server=ServerConfig(state_dir=str(tmp_path / "state"), persist_adapters=False),
            models={"m": ModelConfig(path=str(folder), **fields)},
        )
        return build_service(config, lambda model: fake_engine_thread(), RequestMetrics())

    return build_with


def change(folder, name: str, **fields) -> None:
    path = folder / name
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_how_many_steps_are_remembered(build):
    service = build(iter_stats_max_iterations=7)
    assert service._catalog.model("m").engine.steps.maxlen == 7


def test_the_card(build, folder):
    card = build().model("m").card
    assert (card.name, card.path) == ("m", str(folder))
    assert (card.max_model_len, card.vocab_size) == (2048, 1024)
    assert (card.eos_token_id, card.pad_token_id, card.dtype) == (2, 0, "bfloat16")
    assert (card.quantization, card.device_name) == (None, "")
    card = build(device="cuda:1", quantization="int8").model("m").card
    assert (card.device, card.quantization) == ("cuda:1", "int8")


@pytest.mark.parametrize("has_template", [True, False])
def test_whether_the_model_has_a_chat_template(build, has_template):
    settings = {} if has_template else {"tokenizer_config": {"chat_template": None}}
    assert build(**settings).model("m").card.has_chat_template == has_template


@pytest.mark.parametrize(
    ("checkpoint", "requested", "reported"),
    [
        ("float16", "auto", "float16"),
        (None, "auto", "float32"),
        ("float16", "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype(build, folder, checkpoint, requested, reported):
    change(folder, "config.json", dtype=checkpoint)
    assert build(dtype=requested).model("m").card.dtype == reported


@pytest.mark.parametrize(
    ("requested", "reported"),
    [({}, "bfloat16"), ({"dtype": "float32"}, "float32"), ({"kv_dtype": "int8"}, "int8")],
)
def test_the_kv_dtype(build, requested, reported):
    assert build(**requested).model("m").card.kv_dtype == reported


def test_the_end_token_may_be_the_tokenizers(build, folder):
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", eos_token_id=None)
    assert build().model("m").card.eos_token_id == 2


def test_an_end_token_of_the_tokenizer_alone_ends_outputs_too(build, folder, caplog):
    change(folder, "tokenizer_config.json", eos_token="<|user|>")
    with caplog.at_level("INFO"):
        assert build().model("m").eos_token_ids == (2, 3)
    assert "outputs of model 'm' end at: '</s>' (2), '<|user|>' (3)" in caplog.text


def test_an_end_token_that_the_model_has_no_row_for(build, folder):
    change(folder, "tokenizer_config.json", eos_token="<|added|>")
    assert build().model("m").eos_token_ids == (2,)


def test_max_model_len(build):
    assert build(max_model_len=100).model("m").card.max_model_len == 100
    with pytest.raises(ConfigError, match=naming("max_model_len", 2049, 2048, "m")):
        build(max_model_len=2049)


async def rendered(service: Service) -> str:
    try:
        return await service.model("m").chats.render(HELLO)
    finally:
        await service.close()


async def test_a_chat_template_of_ones_own(build, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("<{{ messages[0].content }}>")
    service = build(chat_template=str(template))
    assert await rendered(service) == "<hi>"


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, ("chat_template",)), (b"\xff", ("UTF-8", "chat_template")), (b"{% if", ("chat",))],
)
def test_a_chat_template_that_is_wrong(build, tmp_path, content, named):
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=naming(*named)) as caught:
        build(chat_template=str(template))
    assert str(template) in caught.value.message


def test_an_unknown_architecture_names_the_known_ones(build, folder):
    change(folder, "config.json", architectures=["BertModel"])
    with pytest.raises(UnsupportedModelError, match=r"BertModel.*LlamaForCausalLM.*Qwen3"):
        build()


def test_local_paths(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config = Config(models={"m": ModelConfig(path="~/model", block_size=8, device="cpu")})
    assert with_local_paths(config).models["m"] == ModelConfig(
        path=str(folder),
        block_size=8,
        device="cpu",
        weights_cache_dir=str(tmp_path / ".cache" / "loraplex" / "weights"),
        kernel_check_dir=str(tmp_path / ".cache" / "loraplex" / "kernels"),
    )
    kept = msgspec.structs.replace(config, server=ServerConfig(state_dir=str(tmp_path / "kept")))
    local = with_local_paths(kept).models["m"]
    assert local.weights_cache_dir == str(tmp_path / "kept" / "weights")
    assert local.kernel_check_dir == str(tmp_path / "kept" / "kernels")
    with pytest.raises(ConfigError, match=naming("/nowhere/at/all")):
        with_local_paths(Config(models={"m": ModelConfig(path="/nowhere/at/all")}))


async def test_a_service_holds_its_state_directory(folder, tmp_path):
    def build_persistent(folder=folder):
        config = Config(
            server=ServerConfig(state_dir=str(tmp_path / "state")),
            models={"m": ModelConfig(path=str(folder))},
        )
        return build_service(config, lambda model: fake_engine_thread(), RequestMetrics())

    with pytest.raises(ConfigError):
        build_persistent(tmp_path)  # no model there: and the state directory is free again
    service = build_persistent()
    with pytest.raises(ConfigError, match=naming("process")):
        build_persistent()
    await service.close()
    await build_persistent().close()


def test_uploads_and_shared_declarations_exclude_each_other(folder, tmp_path):
    def build_with(**settings):
        server = ServerConfig(
            state_dir=str(tmp_path / "state"), persist_adapters=False, uploads=True, **settings
        )
        config = Config(server=server, models={"m": ModelConfig(path=str(folder))})
        return build_service(config, lambda model: fake_engine_thread(), RequestMetrics())

    with pytest.raises(ConfigError, match=naming("uploads", "adapter_declarations")):
        build_with(adapter_declarations=str(tmp_path))
    service = build_with(max_adapter_bytes=77)
    assert service.uploads.max_bytes == 77
    service.uploads.close()


class TestWhatAdaptersMayChange:
    SHAPES = read_config(BASE_PATH)

    def enabled(self, **settings):
        return served_shapes(self.SHAPES, ModelConfig(path="", **settings)).enabled_modules

    def test_any_module(self):
        assert self.enabled() is None

    def test_none(self):
        assert self.enabled(enable_lora=False, lora_target_modules=("attn_q",)) == ()

    def test_some(self):
        assert self.enabled(lora_target_modules=("attn_q", "v_proj")) == ("q_proj", "v_proj")

    def test_an_unknown_one(self):
        with pytest.raises(ConfigError, match=naming("attn", "lora_target_modules", "mlp_h_to_4h")):
            self.enabled(lora_target_modules=("attn",))


def test_the_operator_s_word_about_experts_reaches_the_staging():
    words = ("grouped_by_expert", "swapped")
    model = ModelConfig(path="", expert_lora_layout=words)
    assert served_shapes(read_config(BASE_PATH), model).expert_lora_layout == words


def test_an_end_token_of_the_settings_goes_before_the_models(build, folder):
    assert build(tokenizer_config={"eos_token": "<|user|>"}).model("m").card.eos_token_id == 3
    assert build(tokenizer_config={"eos_token": None}).model("m").card.eos_token_id == 2
    assert build(tokenizer_config={"pad_token": None}).model("m").card.pad_token_id is None


HELLO = [{"role": "user", "content": "hi"}]


async def test_a_chat_template_of_the_settings(build, folder, tmp_path):
    named = {"chat_template": "{{ messages[0]['content'] }}{{ eos_token }}", "eos_token": "<pad>"}
    assert await rendered(build(tokenizer_config=named)) == "hi<pad>"
    (tmp_path / "t.j2").write_text("from the file")
    both = build(tokenizer_config=named, chat_template=str(tmp_path / "t.j2"))
    assert await rendered(both) == "from the file"
    with refused(InvalidRequestError, "chat_template.jinja", param="messages"):
        await rendered(build(tokenizer_config={"chat_template": None}))
    with pytest.raises(ConfigError, match=naming("tokenizer_config.chat_template", 5)):
        build(tokenizer_config={"chat_template": 5})
