import errno
import json
import os
import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.canonical import digest, read_canonical
from loraplex.adapters.formats.inputs import PeftFolder
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    StorageFullError,
    StorageUnavailableError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.naming import naming


def files_in(folder) -> list[str]:
    return sorted(name for _, _, names in os.walk(folder) for name in names)


def test_an_adapter_becomes_one_file_named_by_its_content(staged, peft_folder, tmp_path):
    folder = peft_folder()
    got = staged(folder.write())
    path = canonical_path(tmp_path / "state", got.source.digest)
    assert got.source.path == str(path)
    content = read_canonical(path)
    assert content.digest == got.source.digest == digest(content.rows)
    assert [row.scale for row in content.rows] == [2.0] * 6
    a = next(r for r in content.rows if (r.layer, r.module) == (1, "k_proj")).tensors["a"]
    np.testing.assert_array_equal(
        a.array(), folder.tensors[f"{folder.name(1, 'k_proj')}.lora_A.weight"]
    )


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *[(number, StorageFullError) for number in (errno.ENOSPC, errno.EDQUOT)],
        *[
            (number, StorageUnavailableError)
            for number in (errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG, errno.ESTALE)
        ],
    ],
)
def test_a_file_that_cannot_be_written_is_no_fault_of_the_adapter(
    staged, peft_folder, monkeypatch, number, error
):
    folder = peft_folder().write()

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(error, match=os.strerror(number)) as raised:
            staged(folder)
        assert raised.value.retry_after_seconds
    assert staged(folder).num_tensors == 12


def test_a_file_in_place_of_the_state_directory(staged, peft_folder, tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(StorageUnavailableError):
        staged(peft_folder().write())


def test_the_report(staged, peft_folder):
    got = staged(peft_folder(rank=3).write())
    assert got.source.ranks == {"q_proj": (3, 3), "k_proj": (3, 3), "down_proj": (3, 3)}
    assert got.source.module_layers == dict.fromkeys(("q_proj", "k_proj", "down_proj"), (0, 1))
    assert (got.dtypes, got.num_tensors) == (("F32",), 12)
    assert (got.changes_nothing, got.was_known, got.warnings) == (False, False, ())
    assert got.source.num_bytes == 2 * 4 * 3 * (8 + 12 + 8 + 4 + 16 + 8)
    assert got.source.targets == tuple(sorted(got.source.targets))
    assert list(got.seconds) == ["look_up", "read", "check", "hash", "write"]


def test_the_same_weights_elsewhere_are_the_same_adapter(staged, peft_folder):
    first, second = peft_folder("one"), peft_folder("two")
    second.tensors = {
        name.replace("lora_A", "lora_A.default").replace("base_model.model.", ""): tensor
        for name, tensor in reversed(second.tensors.items())
    }
    assert staged(first.write()).source == staged(second.write()).source


def test_another_alpha_is_another_adapter(staged, peft_folder):
    folder = peft_folder()
    first = staged(folder.write()).source.digest
    folder.config["lora_alpha"] = 5
    assert staged(folder.write()).source.digest != first


class TestStagingAgain:
    def test_an_unchanged_folder_is_not_parsed_again(self, staged, peft_folder, monkeypatch):
        folder = peft_folder().write()
        first = staged(folder)
        monkeypatch.setattr(PeftFolder, "read_tensors", None)
        again = staged(folder)
        assert again.was_known
        assert again.source == first.source
        assert (again.dtypes, again.num_tensors) == (first.dtypes, first.num_tensors)

    def test_it_is_if_requested(self, staged, peft_folder):
        folder = peft_folder().write()
        first = staged(folder)
        again = staged(folder, reads_again=True)
        assert (again.was_known, again.source) == (False, first.source)

    @pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
    def test_a_touched_file_is_parsed_again(self, staged, peft_folder, file):
        folder = peft_folder().write()
        staged(folder)
        os.utime(folder / file, ns=(1, 1))
        assert not staged(folder).was_known

    def test_new_weights_of_the_same_file_size_and_time_are_seen(self, staged, peft_folder):
        newer = (peft_folder("b", seed=2).write() / "adapter_model.safetensors").read_bytes()
        weights = peft_folder("a", seed=1).write() / "adapter_model.safetensors"
        first, before = staged(weights.parent), weights.stat()
        weights.write_bytes(newer)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = weights.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
        second = staged(weights.parent)
        assert not second.was_known
        assert second.source.digest != first.source.digest

    def test_a_lost_or_damaged_normal_file_is_written_again(self, staged, peft_folder, tmp_path):
        folder = peft_folder().write()
        source = staged(folder).source
        for damage in (lambda: os.unlink(source.path), lambda: os.truncate(source.path, 100)):
            damage()
            again = staged(folder)
            assert not again.was_known
            assert read_canonical(canonical_path(tmp_path / "state", source.digest)).rows

    def test_its_report_is_the_first_one(self, staged, peft_folder):
        folder = peft_folder()
        folder.config["base_model_name_or_path"] = "meta/llama"
        folder = folder.write()
        named = {"base_model": "another", "pool_dtype": "bfloat16"}
        first = staged(folder, **named)
        assert len(first.warnings) == 2
        again = staged(folder, **named)
        assert again.was_known
        assert msgspec.structs.replace(again, was_known=False, seconds={}) == (
            msgspec.structs.replace(first, seconds={})
        )
        with pytest.raises(AdapterMismatchError, match="another"):
            staged(folder, **named, base_check=BaseCheck.ERROR)

    def test_a_file_that_was_not_there_is_read(self, staged, peft_folder):
        folder = peft_folder().write()
        staged(folder)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        assert staged(folder).end_tokens.texts == ("<|im_end|>",)
        assert staged(folder).was_known

    def test_a_damaged_note_is_only_a_slower_staging(self, staged, peft_folder, tmp_path):
        folder = peft_folder().write()
        staged(folder)
        (note,) = (tmp_path / "state" / "seen").rglob("*.json")
        values = json.loads(note.read_text())
        for content in (
            "{",
            json.dumps(values | {"digest": "~"}),
            json.dumps(values | {"digest": ""}),
        ):
            note.write_text(content)
            assert not staged(folder).was_known
            assert staged(folder).was_known

    def test_a_known_adapter_is_still_checked_against_the_base(self, staged, peft_folder, shapes):
        folder = peft_folder().write()
        staged(folder)
        other = BaseShapes(shapes.num_layers, shapes.modules | {"q_proj": (9, 12)})
        with pytest.raises(AdapterMismatchError, match="q_proj"):
            staged(folder, shapes=other)
        with pytest.raises(
            AdapterTooLargeError, match=naming(1, "model.layers.0.mlp.down_proj", "max_lora_rank")
        ):
            staged(folder, limits=StagingLimits(max_ranks=RankLimits(1)))


class TestWarnings:
    def test_untrained_adapters_are_flagged(self, staged, peft_folder):
        folder = peft_folder()
        for name, tensor in folder.tensors.items():
            if "lora_B" in name:
                tensor[:] = 0
        assert staged(folder.write()).changes_nothing
        assert staged(folder.write()).changes_nothing
        one = next(name for name in folder.tensors if "lora_B" in name)
        folder.tensors[one][0, 0] = 1e-30
        assert not staged(folder.write()).changes_nothing

    @pytest.mark.parametrize(
        ("trained_on", "base", "warned"),
        [
            ("meta/Llama-2", "other/mistral", True),
            ("meta/Llama-2", "/models/llama-2/", False),
            ("meta/Llama-2", "", False),
            (None, "llama-2", False),
        ],
    )
    def test_another_base_model_is_reported(self, staged, peft_folder, trained_on, base, warned):
        folder = peft_folder()
        folder.config["base_model_name_or_path"] = trained_on
        adapter = staged(folder.write(), base_model=base)
        warnings = adapter.warnings
        assert adapter.trained_on == trained_on
        assert bool(warnings) == warned
        assert all("meta/Llama-2" in warning for warning in warnings)

    def test_another_base_model_is_refused_if_so_chosen(self, staged, peft_folder):
        folder = peft_folder()
        folder.config["base_model_name_or_path"] = "meta/Llama-2"
        for _ in range(2):
            with pytest.raises(AdapterMismatchError, match="meta/Llama-2"):
                staged(folder.write(), base_model="other", base_check=BaseCheck.ERROR)
        assert staged(folder.path, base_model="llama-2", base_check=BaseCheck.ERROR).warnings == ()

    def test_the_pool_s_type_is_reported_the_first_time_and_again(self, staged, peft_folder):
        folder = peft_folder().write()
        for _ in range(2):
            (warning,) = staged(folder, pool_dtype="float16").warnings
            assert "tensors in F32 are rounded to the float16" in warning
        assert staged(folder, pool_dtype="float32").warnings == ()
        large = peft_folder("large")
        next(iter(large.tensors.values()))[0, 0] = 70000
        with pytest.raises(InvalidAdapterError, match="float16"):
            staged(large.write(), pool_dtype="float16")

    @pytest.mark.parametrize("excluded", [["up_proj"], r".*\.mlp\.up_proj", r".*up_proj"])
    def test_targets_that_are_excluded_again_are_not(self, staged, peft_folder, excluded):
        folder = peft_folder()
        folder.config["target_modules"] = ["q_proj", "k_proj", "down_proj", "up_proj", "o_proj"]
        folder.config["exclude_modules"] = excluded
        (warning,) = staged(folder.write()).warnings
        assert "o_proj" in warning
        assert "up_proj" not in warning

    @pytest.mark.parametrize(
        ("changes", "warned"),
        [
            ({}, True),
            ({"target_modules": "all-linear"}, True),
            ({"target_modules": r".*(q_proj|k_proj|down_proj)"}, True),
            ({"exclude_modules": r".*\.0\..*k_proj"}, False),
            ({"target_modules": r".*(q_proj|down_proj|1.*k_proj)"}, False),
        ],
    )
    def test_a_targeted_layer_without_tensors_is_reported(
        self, staged, peft_folder, changes, warned
    ):
        folder = peft_folder()
        for matrix in ("A", "B"):
            del folder.tensors[f"{folder.name(0, 'k_proj')}.lora_{matrix}.weight"]
        folder.config |= changes
        for _ in range(2):  # the second time the file is known
            warnings = staged(folder.write()).warnings
            assert len(warnings) == warned
            assert all("neither lora_A nor lora_B of it in layers 0:" in text for text in warnings)

    def test_layers_that_are_not_targeted_are_not_reported(self, staged, peft_folder):
        folder = peft_folder()
        folder.tensors = {n: t for n, t in folder.tensors.items() if ".layers.1." in n}
        folder.config["layers_to_transform"] = [1]
        assert staged(folder.write()).warnings == ()

    def test_missing_targets_are_reported(self, staged, peft_folder):
        folder = peft_folder()
        del folder.config["target_modules"]
        (warning,) = staged(folder.write()).warnings
        assert "adapter_config.json has no target_modules" in warning

    def test_targets_without_tensors_are_reported(self, staged, peft_folder):
        folder = peft_folder()
        folder.config["target_modules"] = ["q_proj", "k_proj", "down_proj", "up_proj"]
        (warning,) = staged(folder.write()).warnings
        assert "up_proj" in warning


class TestWhereFilesAre:
    def test_links_to_folders_and_files_are_followed(self, staged, peft_folder, tmp_path):
        folder = peft_folder().write()
        (tmp_path / "link").symlink_to(folder)
        blobs = tmp_path / "snapshot"
        blobs.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (blobs / name).symlink_to(folder / name)
        digests = {staged(path).source.digest for path in (folder, tmp_path / "link", blobs)}
        assert len(digests) == 1

    def test_a_bin_file_is_the_same_adapter(self, staged, peft_folder):
        folder = peft_folder()
        expected = staged(folder.write()).source.digest
        tensors = {name: torch.from_numpy(tensor) for name, tensor in folder.tensors.items()}
        torch.save(tensors, folder.path / "adapter_model.bin")
        os.unlink(folder.path / "adapter_model.safetensors")
        assert staged(folder.path).source.digest == expected

    def test_torch_is_not_loaded_for_safetensors(self, peft_folder, shapes, tmp_path):
        code = (
            "import sys, msgspec\n"
            "from loraplex.adapters.staged import StageRequest\n"
            "from loraplex.adapters.staging_worker import reply_to\n"
            "request = msgspec.json.decode(sys.stdin.buffer.read(), type=StageRequest)\n"
            "assert reply_to(request).staged is not None\n"
            "assert 'torch' not in sys.modules\n"
        )
        request = StageRequest(
            request_id=1,
            path=str(peft_folder().write()),
            state_dir=str(tmp_path / "state"),
            shapes=shapes,
        )
        subprocess.run([sys.executable, "-c", code], input=msgspec.json.encode(request), check=True)

    @pytest.mark.parametrize(
        ("remove", "named"),
        [
            (("adapter_config.json",), ("adapter_config.json",)),
            (("adapter_model.safetensors",), ("adapter_model.safetensors", "adapter_model.bin")),
        ],
    )
    def test_a_file_that_is_missing_is_named(self, staged, peft_folder, remove, named):
        folder = peft_folder().write()
        for name in remove:
            os.unlink(folder / name)
        with pytest.raises(InvalidAdapterError, match=naming(*named)):
            staged(folder)

    @pytest.mark.parametrize("path", ["", "\0", "/does/not/exist", "x" * 5000])
    def test_a_path_that_is_no_folder(self, staged, path):
        with pytest.raises(InvalidAdapterError):
            staged(path)

    def test_a_file_is_no_folder_and_a_loop_of_links_is_none(self, staged, tmp_path):
        (tmp_path / "file").write_text("x")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for name in ("file", "loop"):
            with pytest.raises(InvalidAdapterError, match=name):
                staged(tmp_path / name)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"use_dora": True}, InvalidAdapterError),
            ({"use_qalora": True}, UnsupportedFeatureError),
            ({"bias": "sometimes"}, InvalidAdapterError),
            ({"r": 3}, InvalidAdapterError),
            ({"target_modules": ["v_proj"]}, InvalidAdapterError),
        ],
    )
    def test_nothing_is_left_behind(self, staged, peft_folder, tmp_path, change, error):
        folder = peft_folder()
        folder.config |= change
        with pytest.raises(error):
            staged(folder.write())
        assert files_in(tmp_path / "state") == []

    def test_a_file_that_changes_meanwhile(self, staged, peft_folder, monkeypatch, tmp_path):
        folder = peft_folder().write()
        original = PeftFolder.read_tensors

        def read_and_touch(self, limits):
            tensors = original(self, limits)
            os.utime(folder / "adapter_model.safetensors", ns=(5, 5))
            return tensors

        monkeypatch.setattr(PeftFolder, "read_tensors", read_and_touch)
        with pytest.raises(InvalidAdapterError, match=naming("changed")):
            staged(folder)
        assert files_in(tmp_path / "state" / "seen") == []

    def test_the_file_size_is_limited(self, staged, peft_folder):
        limits = StagingLimits(max_file_bytes=100)
        with pytest.raises(AdapterTooLargeError, match=naming(100)):
            staged(peft_folder().write(), limits=limits)


def test_tensors_of_a_vision_tower_are_left_out_and_reported_at_each_load(peft_folder, staged):
    plain = staged(peft_folder("plain").write())
    folder = peft_folder()
    tower = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj"
    folder.tensors[f"{tower}.lora_A.weight"] = np.ones((2, 3), np.float32)
    folder.tensors[f"{tower}.lora_B.weight"] = np.ones((3, 2), np.float32)
    path = folder.write()
    for _ in range(2):
        adapter = staged(path)
        assert adapter.source.digest == plain.source.digest
        (warning,) = [text for text in adapter.warnings if "left out" in text]
        assert "2 tensors" in warning
        assert tower in warning


def test_the_folder_of_a_training_run(staged, peft_folder, tmp_path):
    for step in (500, 1000):
        peft_folder(f"run/checkpoint-{step}").write()
    with pytest.raises(
        InvalidAdapterError, match=naming("checkpoint-1000", 1, "adapter_model.safetensors")
    ):
        staged(tmp_path / "run")


def test_a_shape_of_another_base_model(staged, peft_folder):
    folder = peft_folder()
    folder.config["base_model_name_or_path"] = "meta/Llama-2"
    name = f"{folder.name(0, 'q_proj')}.lora_A.weight"
    folder.tensors[name] = np.zeros((2, 99), np.float32)
    with pytest.raises(AdapterMismatchError) as caught:
        staged(folder.write(), base_model="qwen")
    message = caught.value.message
    assert re.search(naming("meta/Llama-2", "qwen"), message)
    assert "99" in message


class TestMagnitudes:
    """Numbers that overflow in the first step, in every format."""

    @pytest.fixture
    def is_refused(self, staged):
        def check(path, **fields):
            with pytest.raises(InvalidAdapterError, match=naming(1, "float32")):
                staged(path, pool_dtype="float32", **fields)

        return check

    @pytest.mark.parametrize("alpha", [1e30, 1e38])
    def test_a_huge_alpha(self, is_refused, peft_folder, alpha):
        folder = peft_folder()
        folder.config["lora_alpha"] = alpha
        is_refused(folder.write())

    def test_huge_weights_of_a_pair(self, is_refused, pair, tmp_path):
        is_refused(pair.write(tmp_path / "pair", pair.weights() * 1e20))

    def test_a_canonical_file(self, is_refused, staged, peft_folder):
        folder = peft_folder()
        folder.config["lora_alpha"] = 1e30
        is_refused(staged(folder.write()).source.path)

    def test_what_was_staged_for_another_type_is_checked_again(self, staged, peft_folder):
        folder = peft_folder()
        folder.config["lora_alpha"] = 1e6
        path = folder.write()
        staged(path, pool_dtype="bfloat16")
        assert staged(path, pool_dtype="bfloat16").was_known
        with pytest.raises(InvalidAdapterError, match=naming("float16", 65520)):
            staged(path, pool_dtype="float16")
