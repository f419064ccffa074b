"""Paths, hosts and addresses that are refused, and those that are not."""

import socket
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.sources.http import PinnedTransport
from loraplex.adapters.sources.policy import SourcePolicy, checked_path, client_policy, matches
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import (
    AdapterLoadError,
    ConfigError,
    InvalidAdapterError,
    PermissionDeniedError,
)
from loraplex.core.server_config import ServerConfig
from support.naming import naming, refused

NAMES = ("adapter_config.json",)


class TestPaths:
    @pytest.fixture
    def root(self, tmp_path):
        (tmp_path / "root" / "team" / "v1.2").mkdir(parents=True)
        (tmp_path / "secret").mkdir()
        return tmp_path / "root"

    def check(self, path, root):
        return checked_path(str(path), SourcePolicy(roots=(str(root),)), NAMES)

    def test_what_lies_within(self, root, monkeypatch):
        assert self.check(root / "team" / "v1.2", root) == root / "team" / "v1.2"
        (root / "link").symlink_to(root / "team")
        assert self.check(root / "link" / "v1.2", root) == root / "team" / "v1.2"
        monkeypatch.chdir(root)
        assert self.check("team", root) == root / "team"

    def test_a_root_that_is_a_link(self, root, tmp_path):
        (tmp_path / "alias").symlink_to(root)
        assert self.check(root / "team", tmp_path / "alias") == root / "team"
        assert self.check(tmp_path / "alias" / "team", "~/../" * 9 + str(root)) == root / "team"

    @pytest.mark.parametrize("path", ["../secret", "team/../../secret", "../rootless", "/etc"])
    def test_what_leaves(self, root, path):
        with pytest.raises(PermissionDeniedError, match="allowed_adapter_roots"):
            self.check(root / path, root)

    def test_a_link_into_the_state_directory(self, root):
        state = root / "state"
        state.mkdir()
        (root / "link").symlink_to(state)
        policy = SourcePolicy(roots=(str(root),), closed_folder=str(root / "link"))
        for place in (state, root / "link", state / "none"):
            with refused(PermissionDeniedError, "state", param="path"):
                checked_path(str(place), policy, NAMES)

    def test_a_gguf_file_that_leaves(self, root, tmp_path):
        (root / "team" / "v1.2" / "any.gguf").symlink_to(tmp_path / "secret")
        with refused(PermissionDeniedError, "v1.2/any.gguf", param="path"):
            self.check(root / "team" / "v1.2", root)

    def test_links_that_leave(self, root, tmp_path):
        (root / "out").symlink_to(tmp_path / "secret")
        with refused(PermissionDeniedError, "out", "allowed_adapter_roots", param="path"):
            self.check(root / "out", root)
        (root / "team" / NAMES[0]).symlink_to(tmp_path / "secret" / "x")
        with refused(
            PermissionDeniedError, "adapter_config.json", "allowed_adapter_roots", param="path"
        ):
            self.check(root / "team", root)

    def test_missing_files_are_reported_only_within(self, root, tmp_path):
        # The system's text.
        with pytest.raises(InvalidAdapterError, match="No such file"):
            self.check(root / "none", root)
        with pytest.raises(PermissionDeniedError):
            self.check(tmp_path / "none", root)

    def test_no_roots(self, root):
        with refused(PermissionDeniedError, "allowed_adapter_roots", param="path"):
            checked_path(str(root), SourcePolicy(roots=()), NAMES)
        assert checked_path(str(root), SourcePolicy(), NAMES) == root
        assert checked_path(str(root), SourcePolicy(roots=()).for_operator(), NAMES) == root

    @pytest.mark.parametrize("path", ["", "a\0b", "~nobody-of-this-name/x"])
    def test_odd_paths(self, path):
        with pytest.raises(InvalidAdapterError):
            checked_path(path, SourcePolicy(), NAMES)

    def test_a_root_that_is_a_loop_or_of_no_user_closes_no_other(self, root, tmp_path):
        (tmp_path / "loop").symlink_to("loop")
        policy = SourcePolicy(roots=(str(tmp_path / "loop"), "~no-such-user/x", str(root)))
        assert checked_path(str(root / "team"), policy, NAMES) == root / "team"

    def test_a_loop(self, tmp_path):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(InvalidAdapterError, match=naming(tmp_path / "loop")):
            checked_path(str(tmp_path / "loop"), SourcePolicy(), NAMES)


@pytest.mark.parametrize(
    ("host", "patterns", "expected"),
    [
        ("huggingface.co", ("huggingface.co",), True),
        ("HuggingFace.co.", ("huggingface.CO",), True),
        ("evil-huggingface.co", ("huggingface.co", "*.huggingface.co"), False),
        ("huggingface.co.evil.org", ("huggingface.co", "*.huggingface.co"), False),
        ("cdn.hf.co", ("*.hf.co",), True),
        ("hf.co", ("*.hf.co",), False),
        ("any.thing", ("*",), True),
        ("any.thing", (), False),
    ],
)
def test_hosts(host, patterns, expected):
    assert matches(host, patterns) is expected


def test_buckets():
    policy = SourcePolicy(hosts=("s3://ours",))
    policy.check_bucket("s3://ours/zh")
    for url in ("s3://ours2/zh", "gs://ours/zh"):
        with pytest.raises(PermissionDeniedError, match="allowed_adapter_hosts"):
            policy.check_bucket(url)
    SourcePolicy(hosts=("*",)).check_bucket("s3://any/zh")


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "0.0.0.0", "240.0.0.1",
    "255.255.255.255", "::1", "fc00::1", "fd12::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::1",
]  # fmt: skip
NEVER = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "ff02::1", "0.0.0.0", "::"]


class TestAddresses:
    @pytest.mark.parametrize("address", [*PRIVATE, *NEVER])
    def test_what_is_not_public(self, address):
        with refused(PermissionDeniedError, "address", param="path"):
            SourcePolicy().check_address("h", address)

    @pytest.mark.parametrize(
        "address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
    )
    def test_what_is(self, address):
        SourcePolicy().check_address("h", address)

    def test_private_ones_by_setting(self):
        policy = SourcePolicy(allow_private_addresses=True)
        for address in ("127.0.0.1", "10.1.2.3", "::1", "fc00::1"):
            policy.check_address("h", address)
        for address in NEVER:
            with pytest.raises(PermissionDeniedError):
                policy.check_address("h", address)

    @pytest.mark.parametrize(
        "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"]]
    )
    def test_every_address_from_the_name_server_is_checked(self, monkeypatch, addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 80)) for a in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("connected"))
        with refused(
            PermissionDeniedError, "rebound.example.org", "allow_private_addresses", param="path"
        ):
            SourcePolicy().addresses("rebound.example.org", 80)
        client = httpx.Client(transport=PinnedTransport(SourcePolicy()))
        with refused(
            PermissionDeniedError, "rebound.example.org", "allow_private_addresses", param="path"
        ):
            client.get("http://rebound.example.org/")

    def test_the_connection_goes_to_the_checked_address(self, monkeypatch):
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80)),
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606:4700::1", 80, 0, 0)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        connected = []

        def refuse(address, *_, **__):
            connected.append(address)
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr(socket, "create_connection", refuse)
        client = httpx.Client(transport=PinnedTransport(SourcePolicy()))
        # The system's text.
        with pytest.raises(httpx.ConnectError, match="Connection refused"):
            client.get("https://example.org:8443/zh")
        assert connected == [("8.8.8.8", 8443), ("2606:4700::1", 8443)]

    def test_a_name_that_is_not_found(self, monkeypatch):
        def fail(*_, **__):
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(AdapterLoadError, match=naming("none.example.org", "[Errno -2]")):
            SourcePolicy().addresses("none.example.org", 80)


class TestNames:
    """What is refused where a proxy resolves the names."""

    @pytest.mark.parametrize(
        "host",
        ["localhost", "LOCALHOST.", "a.localhost", "minio", "printer.local", "metadata.internal"],
    )
    def test_names_that_are_not_public(self, host):
        with refused(PermissionDeniedError, "host", "allow_private_addresses", param="path"):
            SourcePolicy().check_name(host)
        SourcePolicy(allow_private_addresses=True).check_name(host)

    @pytest.mark.parametrize("host", [*PRIVATE, *NEVER, "127.1", "0x7f000001", "2130706433", "0"])
    def test_addresses_however_they_are_written(self, host):
        with refused(PermissionDeniedError, host, param="path"):
            SourcePolicy().check_name(host)

    @pytest.mark.parametrize("host", ["example.org", "8.8.8.8", "2606:4700::1"])
    def test_public_ones(self, host):
        SourcePolicy().check_name(host)

    def test_link_local_addresses_are_never_allowed(self):
        with refused(PermissionDeniedError, "169.254.169.254", param="path"):
            SourcePolicy(allow_private_addresses=True).check_name("169.254.169.254")


class TestForClients:
    def policy(self, *, adapter_dirs=(), lora_root="", **server):
        model = ModelConfig(path="/m", adapter_dirs=adapter_dirs, lora_root=lora_root)
        config = Config(server=ServerConfig(**server), models={"m": model})
        return client_policy(config, Path("/state"))

    def test_never_the_state_directory(self):
        for host in ("127.0.0.1", "0.0.0.0"):
            policy = self.policy(host=host, allowed_adapter_roots=("/",))
            with refused(PermissionDeniedError, "state directory", param="path"):
                policy.check_path(Path("/state/adapters/ab/x.safetensors"), "x")
            policy.for_operator().check_path(Path("/state/adapters/ab/x.safetensors"), "x")

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
    def test_on_loopback_every_path(self, host):
        assert self.policy(host=host, adapter_dirs=("/a",)).roots is None
        assert self.policy(host=host, allowed_adapter_roots=("/b",)).roots == ("/b",)

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "::"])
    def test_elsewhere_what_is_configured(self, host):
        assert self.policy(host=host).roots == ()
        policy = self.policy(
            host=host, adapter_dirs=("/a",), lora_root="/l", allowed_adapter_roots=("/b",)
        )
        assert policy.roots == ("/b", "/a", "/l")

    def test_only_allowed_hosts(self):
        assert self.policy().hosts == ()
        hosts = ("huggingface.co", "*.example.org", "s3://bucket", "*", "::1")
        assert self.policy(allowed_adapter_hosts=hosts).hosts == hosts

    @pytest.mark.parametrize("host", ["https://h", "h/x", "", "a*b", "ftp://x", "s3://"])
    def test_what_is_no_host(self, host):
        with pytest.raises(ConfigError, match="allowed_adapter_hosts"):
            self.policy(allowed_adapter_hosts=(host,))
