"""Which adapters lie in a folder, under which names, and whether they have changed."""

import json
import os

import pytest

from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.errors import ConfigError
from loraplex.serving.adapters.folders import (
    FolderScan,
    find_adapters,
    find_below,
    find_named,
    read_list,
    signature_of,
)
from support.naming import naming, refused


def put(folder, name="adapter_config.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    return folder


def names(found):
    return [name for name, _ in found]


class TestBelowARoot:
    def test_folders_and_files_at_any_depth(self, tmp_path):
        put(tmp_path / "zh")
        put(tmp_path / "team" / "deep" / "v1.2", "model.lora_weights.npy")
        put(tmp_path / "team", "v2.0.safetensors")
        put(tmp_path, "ja.safetensors")
        put(tmp_path, "fr-v1.0.gguf")
        put(tmp_path, "readme.md")
        (tmp_path / "empty").mkdir()
        found = find_below(tmp_path, FolderScan())
        assert dict(found) == {
            "fr-v1.0": tmp_path / "fr-v1.0.gguf",
            "ja": tmp_path / "ja.safetensors",
            "team/deep/v1.2": tmp_path / "team" / "deep" / "v1.2",
            "team/v2.0": tmp_path / "team" / "v2.0.safetensors",
            "zh": tmp_path / "zh",
        }

    def test_the_files_of_an_adapter_are_none_themselves(self, tmp_path):
        put(put(tmp_path / "zh"), "adapter_model.safetensors")
        assert names(find_below(tmp_path, FolderScan())) == ["zh"]

    def test_hidden_ones_are_not_meant(self, tmp_path):
        put(tmp_path / ".arriving")
        put(tmp_path / "..data" / "zh")
        put(tmp_path, ".tmp.safetensors")
        assert find_below(tmp_path, FolderScan()) == []

    @pytest.fixture
    def linked(self, tmp_path):
        """A folder with one adapter, one link within it, and five links that leave it."""
        root, outside = tmp_path / "root", tmp_path / "outside"
        put(root / "zh")
        put(outside / "secret")
        put(outside, "file.safetensors")
        (root / "a").symlink_to(outside / "secret")
        (root / "b.safetensors").symlink_to(outside / "file.safetensors")
        (root / "c").symlink_to(outside)
        (put(root / "d") / "adapter_model.safetensors").symlink_to(outside / "file.safetensors")
        (root / "within").symlink_to(root / "zh")
        (root / "gone").symlink_to(outside / "gone")
        return root

    def test_links_that_leave_are_left_out(self, linked):
        scan = FolderScan()
        assert names(find_below(linked, scan)) == ["within", "zh"]
        left = {os.path.relpath(one.path, linked) for one in scan.left_out}
        assert left == {"a", "b.safetensors", "c", "d/adapter_model.safetensors", "gone"}
        assert all(one.is_link and "symbolic link" in one.reason for one in scan.left_out)
        (secret,) = (one for one in scan.left_out if one.path.endswith("/a"))
        assert f"{linked.parent / 'outside' / 'secret'}, where" in secret.reason
        assert "--allowed-adapter-roots" in secret.reason
        scan = FolderScan()
        assert names(find_adapters(linked, scan)) == ["within", "zh"]
        assert len(scan.left_out) == 3  # a file and a folder without an adapter are none here

    @pytest.mark.parametrize("roots", [None, "outside"])
    def test_links_to_where_adapters_may_be_are_followed(self, linked, roots):
        policy = SourcePolicy(roots=roots and (str(linked.parent / roots),))
        scan = FolderScan(policy)
        found = ["a", "b", "c/file", "c/secret", "d", "within", "zh"]
        assert names(find_below(linked, scan)) == found
        assert [one.path for one in scan.left_out] == [str(linked / "gone")]
        for name, path in find_below(linked, FolderScan(policy)):
            assert find_named(linked, name, policy) == path
            leaves = name not in ("within", "zh")
            assert (find_named(linked, name) is None) == leaves

    def test_no_link_leads_into_the_state_directory(self, linked):
        policy = SourcePolicy(closed_folder=str(linked.parent / "outside"))
        assert names(find_below(linked, FolderScan(policy))) == ["within", "zh"]

    def test_a_root_that_is_a_link_or_relative(self, tmp_path, monkeypatch):
        put(tmp_path / "root" / "zh")
        (tmp_path / "link").symlink_to(tmp_path / "root")
        assert names(find_below(tmp_path / "link", FolderScan())) == ["zh"]
        monkeypatch.chdir(tmp_path)
        assert names(find_below(type(tmp_path)("root"), FolderScan())) == ["zh"]

    def test_entries_that_cannot_be_read_leave_the_others(self, tmp_path, monkeypatch):
        put(tmp_path / "zh")
        for name in ("loop", "loop.safetensors"):
            (tmp_path / name).symlink_to(name)
        (tmp_path / "gone.safetensors").symlink_to("nothing")
        (tmp_path / "long.gguf").symlink_to("x" * 300)
        (tmp_path / "closed" / "de").mkdir(parents=True)
        listdir = os.listdir

        def refusing(path):
            if os.path.basename(path) == "closed":
                raise PermissionError(13, "Permission denied", str(path))
            return listdir(path)

        monkeypatch.setattr(os, "listdir", refusing)
        scan = FolderScan()
        assert "zh" in names(find_below(tmp_path, scan))
        assert any("closed: Permission denied" in one.reason for one in scan.left_out)
        assert "zh" in names(find_adapters(tmp_path, FolderScan()))
        for name in ("loop", "gone", "long"):
            assert find_named(tmp_path, name) is None

    def test_links_in_a_circle(self, tmp_path):
        put(tmp_path / "zh")
        for name in ("team", "other"):
            (tmp_path / name).mkdir()
        (tmp_path / "team" / "up").symlink_to(tmp_path)
        (tmp_path / "team" / "other").symlink_to(tmp_path / "other")
        (tmp_path / "other" / "team").symlink_to(tmp_path / "team")
        (tmp_path / "self").symlink_to(tmp_path / "self")
        scan = FolderScan(SourcePolicy())
        assert names(find_below(tmp_path, scan)) == ["zh"]
        assert [one.path for one in scan.left_out] == [str(tmp_path / "self")]
        assert find_named(tmp_path, "team/up/zh", SourcePolicy()) is None

    def test_far_too_deep(self, tmp_path):
        put(tmp_path / "/".join("d" * 18))
        scan = FolderScan()
        assert find_below(tmp_path, scan) == []
        (deep,) = scan.left_out
        assert not deep.is_link
        assert "is deeper than 16 folders" in deep.reason

    def test_nothing_there(self, tmp_path):
        with refused(ConfigError, tmp_path / "none"):
            find_below(tmp_path / "none", FolderScan())


class TestAList:
    def read(self, tmp_path, content):
        path = tmp_path / "multi_lora.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_list(path)

    def test_names_and_paths(self, tmp_path):
        listed = {"v1.2": "zh", "team/ja": "hf://owner/name", "alpaca": "/vllm_workspace/alpaca"}
        assert self.read(tmp_path, listed) == sorted(listed.items())
        assert self.read(tmp_path, {}) == []

    @pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"path": "x"}}', "[" * 9999])
    def test_what_is_no_list(self, tmp_path, content):
        with pytest.raises(ConfigError, match=naming("multi_lora.json")):
            self.read(tmp_path, content)

    def test_none(self, tmp_path):
        with refused(ConfigError, "multi_lora", tmp_path / "none.json"):
            read_list(tmp_path / "none.json")


class TestSignatures:
    def test_change_with_the_files(self, tmp_path):
        folder = put(tmp_path / "zh")
        seen = {signature_of(folder)}
        (folder / "adapter_config.json").write_text("{ }")
        seen.add(signature_of(folder))
        os.utime(folder / "adapter_config.json", (1, 1))
        seen.add(signature_of(folder))
        put(folder, "adapter_model.safetensors")
        seen.add(signature_of(folder))
        os.utime(folder / "adapter_model.safetensors", (1, 1))
        replaced = put(tmp_path / "new", "adapter_model.safetensors") / "adapter_model.safetensors"
        os.utime(replaced, (1, 1))
        seen.add(signature_of(folder))
        replaced.replace(folder / "adapter_model.safetensors")
        seen.add(signature_of(folder))
        assert len(seen) == 6
        assert signature_of(folder) == signature_of(folder)

    def test_of_a_file_and_of_nothing(self, tmp_path):
        file = put(tmp_path, "zh.safetensors") / "zh.safetensors"
        assert signature_of(file)[0][0] == "zh.safetensors"
        assert signature_of(tmp_path / "none") == ()


class TestNamedBelowARoot:
    @pytest.mark.parametrize(
        ("name", "path"),
        [
            *(("zh", "zh"), ("team/v1.2", "team/v1.2"), ("team/v2.0", "team/v2.0.safetensors")),
            ("team/v3.0", "team/v3.0.gguf"),
        ],
    )
    def test_what_find_below_would_call_so(self, tmp_path, name, path):
        put(tmp_path / "zh")
        put(tmp_path / "team" / "v1.2")
        put(tmp_path / "team", "v2.0.safetensors")
        put(tmp_path / "team", "v3.0.gguf")
        assert (
            dict(find_below(tmp_path, FolderScan()))[name]
            == find_named(tmp_path, name)
            == tmp_path / path
        )

    @pytest.mark.parametrize(
        "name",
        ["", "gone", "team", "../out", "a/../zh", "/zh", "zh/", "./zh", ".zh", "a\0b", "a/" * 20],
    )
    def test_what_is_none_or_elsewhere(self, tmp_path, name):
        root = put(tmp_path / "root" / "zh").parent
        put(root / ".zh")
        put(tmp_path / "out")
        (root / "team").mkdir()
        assert find_named(root, name) is None

    def test_links_do_not_lead_out(self, tmp_path):
        root = put(tmp_path / "root" / "zh").parent
        out = put(tmp_path / "out")
        put(tmp_path, "file.safetensors")
        (root / "link").symlink_to(out)
        (root / "file.safetensors").symlink_to(tmp_path / "file.safetensors")
        (root / "within").symlink_to(root / "zh")
        put(root / "parts")
        (root / "parts" / "more").symlink_to(out)
        found = {name: find_named(root, name) for name in ("link", "file", "within", "parts")}
        assert found == {"link": None, "file": None, "within": root / "within", "parts": None}

    def test_what_find_below_does_not_look_into(self, tmp_path):
        put(tmp_path / "zh")
        put(tmp_path / "zh" / "checkpoint-500")
        put(tmp_path / "team" / "v1")
        (tmp_path / "linked").symlink_to(tmp_path / "team")
        names = ("zh/checkpoint-500", "zh/adapter_config.json", "zh/adapter_model")
        put(tmp_path / "zh", "adapter_model.safetensors")
        assert [find_named(tmp_path, name) for name in names] == [None] * 3
        found = ["linked/v1", "team/v1", "zh"]
        assert [name for name, _ in find_below(tmp_path, FolderScan())] == found

    def test_a_name_that_no_file_can_have(self, tmp_path):
        assert find_named(tmp_path, "a" * 5000) is None


def test_the_weights_of_a_base_model_are_no_adapter(tmp_path):
    put(tmp_path / "base", "config.json")
    put(tmp_path / "base", "model.safetensors")
    put(tmp_path / "zh")
    assert names(find_below(tmp_path, FolderScan())) == ["zh"]
    assert find_named(tmp_path, "base/model") is None
