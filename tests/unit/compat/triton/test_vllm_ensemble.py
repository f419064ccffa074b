"""An ensemble of one vLLM model, and repositories of which only some models are loaded."""

import json

import pytest

from loraplex.compat.triton.repository import Reloading, read_repositories
from loraplex.core.config_layers import resolve
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.errors import NotFoundError
from loraplex.frontends.kserve.models.kinds import BackendDialect
from support.naming import naming

STEP = """{
  model_name: "%s"
  model_version: -1
  input_map { key: "text_input" value: "%s" }
  input_map { key: "stream" value: "stream" }
  output_map { key: "text_output" value: "%s" }
}"""


class Folder:
    """A repository that a test writes model by model."""

    def __init__(self, path):
        self.path = path
        (path / "weights").mkdir()

    def vllm(self, name, **arguments):
        arguments = {"model": str(self.path / "weights"), **arguments}
        self._pbtxt(name, 'backend: "vllm"')
        (self.path / "r" / name / "1").mkdir()
        (self.path / "r" / name / "1" / "model.json").write_text(json.dumps(arguments))

    def ensemble(self, name, *steps, tensors=("question", "answer"), batch=1):
        first, last = tensors
        ends = [(first, "middle"), ("middle", last)] if len(steps) == 2 else [tensors]
        written = [STEP % (step, *names) for step, names in zip(steps, ends, strict=True)]
        rows = "".join(
            f'{field} {{ name: "{tensor}" data_type: {datatype} dims: [ {dims} ] }}'
            for field, tensor, datatype, dims in (
                ("input", first, "TYPE_STRING", 1),
                ("input", "stream", "TYPE_BOOL", 1),
                ("output", last, "TYPE_STRING", -1),
            )
        )
        self._pbtxt(
            name,
            f'platform: "ensemble" max_batch_size: {batch} {rows} '
            f"ensemble_scheduling {{ step [{', '.join(written)}] }}",
        )

    def other(self, name, text='backend: "python" input { name: "INPUT0" }'):
        self._pbtxt(name, text)

    def read(self, *wanted):
        return read_repositories([self.path / "r"], wanted or None)

    def _pbtxt(self, name, text):
        (self.path / "r" / name).mkdir(parents=True)
        (self.path / "r" / name / "config.pbtxt").write_text(text)


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path)
    folder.vllm("vllm_opt", enable_lora=False)
    return folder


def declared(repository, name):
    return next(each for each in repository.declarations if each.name == name)


def test_the_ensemble_has_the_tensors_of_its_step_under_its_own_names(folder):
    folder.ensemble("chat", "vllm_opt")
    repository = folder.read()
    chat = declared(repository, "chat")
    assert (chat.base_model, chat.is_decoupled, chat.max_batch_size) == ("vllm_opt", True, 1)
    assert chat.kind.dialect is BackendDialect.VLLM
    assert {row.name: row.field for row in chat.kind.inputs} == {
        "question": "text_input",
        "stream": "is_streamed",
    }
    assert chat.kind.required_inputs == ("question",)
    assert [row.name for row in chat.kind.outputs] == ["answer"]
    assert chat.config["platform"] == "ensemble"
    assert not chat.options.lora_enabled
    assert list(resolve(repository.layers).models) == ["vllm_opt"]


def test_its_batches_have_one_element(folder):
    folder.ensemble("chat", "vllm_opt", batch=8)
    chat = declared(folder.read(), "chat")
    assert (chat.max_batch_size, chat.config["max_batch_size"]) == (1, 8)


def test_steps_that_cannot_be_passed_through_are_named(folder):
    folder.vllm("second")
    folder.ensemble("chat", "vllm_opt", "second")
    with pytest.raises(ConfigError, match=naming("second", "vLLM", "chat", "vllm_opt")):
        folder.read()
    folder.other("upper")
    folder.ensemble("loud", "upper", "vllm_opt")
    with pytest.raises(ConfigError, match=naming("upper", "loud", "TOKENS_BATCH")):
        folder.read("loud")
    folder.ensemble("gone", "nowhere")
    with pytest.raises(ConfigError, match=naming("nowhere", "gone", "vllm_opt")):
        folder.read("gone")


def test_tensors_that_a_vllm_model_does_not_have(folder):
    folder.ensemble("chat", "vllm_opt")
    pbtxt = folder.path / "r" / "chat" / "config.pbtxt"
    text = pbtxt.read_text()
    pbtxt.write_text(text.replace('key: "stream"', 'key: "streamed"'))
    with pytest.raises(ConfigError, match=naming("input_map", "vLLM", "streamed")):
        folder.read()
    pbtxt.write_text(text.replace('key: "text_input"', 'key: "sampling_parameters"'))
    with pytest.raises(ConfigError, match=naming("input_map", "text_input", "vLLM")):
        folder.read()


def test_what_is_not_loaded_stops_no_start(folder):
    folder.vllm("invalid", invalid_attribute=True)
    folder.other("add_sub")
    folder.other("torn", "platform: {{{")
    folder.ensemble("loud", "add_sub", "vllm_opt")
    folder.ensemble("lost", "nowhere")
    folder.vllm("second")
    repository = folder.read("vllm_opt")
    assert [each.name for each in repository.declarations] == ["second", "vllm_opt"]
    assert repository.loaded == ("vllm_opt",)
    assert list(resolve(repository.layers).models) == ["vllm_opt"]
    left_out = {note.split()[0] for note in repository.notes.infos if "left out" in note}
    assert left_out == {"invalid", "add_sub", "torn", "loud", "lost"}
    for name, reason in {
        "invalid": "invalid_attribute",
        "add_sub": "is not served",
        "torn": "config.pbtxt",
        "lost": "nowhere",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            folder.read(name)
    with pytest.raises(ConfigError):
        folder.read()


def test_nothing_is_loaded(folder):
    folder.other("add_sub")
    repository = read_repositories([folder.path / "r"], ())
    assert (repository.layers, repository.loaded) == ((), ())
    assert [each.name for each in repository.declarations] == ["vllm_opt"]


def test_a_model_that_is_loaded_later(folder):
    folder.vllm("second", max_num_seqs=3)
    folder.ensemble("chat", "second")
    reloading = Reloading(
        folder.read("vllm_opt"), [folder.path / "r"], lambda found: resolve(found.layers)
    )
    folder.vllm("third", max_num_seqs=4)
    found = reloading.discover("chat")
    assert {each.name for each in found.declarations} == {"chat", "second"}
    assert found.settings.max_num_seqs == 3
    assert reloading(found.declarations[0], None, {}).name == found.declarations[0].name
    assert reloading.discover("third").settings.max_num_seqs == 4, "as the folder is now"
    # Triton's text.
    with pytest.raises(NotFoundError, match="failed to load 'gone', failed to poll from mo"):
        reloading.discover("gone")
