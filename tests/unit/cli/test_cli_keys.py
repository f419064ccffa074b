"""`loraplex keys`: what is printed, where, and what is kept."""

import json
import re

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.serving.access.api_key_ring import ApiKeys
from support.naming import naming


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


@pytest.fixture
def run(path):
    def run(*arguments, **options):
        return CliRunner().invoke(app, ["keys", *arguments, "--file", str(path)], **options)

    return run


def test_a_key_is_printed_once_and_alone(run, path):
    result = run("create", "--tenant", "acme")
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert ApiKeys(path).principal(key).tenant == "acme"
    assert key not in result.stderr
    assert "'acme' is a new tenant" in result.stderr
    assert "it is shown only now" in result.stderr
    assert "new tenant" not in run("create", "--tenant", "acme").stderr
    assert key not in run("list").output + path.read_text()


def test_listing_and_revoking(run, path):
    key = run("create", "--tenant", "ops", "--operator").stdout.strip()
    run("create", "--tenant", "acme")
    first, second = json.loads(run("list", "--json").stdout)
    assert (first["tenant"], second["tenant"]) == ("ops", "acme")
    rights = ApiKeys(path).principal(key).rights
    assert (rights.operator, bool(rights.manage)) == (True, False)
    assert run("revoke", first["id"]).stdout == f"key {first['id']} is revoked\n"
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["ID", "STATE", "CREATED", "TENANT"]
    assert lines[1].startswith(f"{first['id']}  revoked  20")
    assert lines[2].startswith(f"{second['id']}  valid ")


@pytest.mark.parametrize("flags", [(), ("--operator",)])
@pytest.mark.parametrize("tenant", ["acme", "acme.eu"])
def test_a_tenant_that_manages_its_adapters(run, path, tenant, flags):
    key = run("create", "--tenant", tenant, "--manage", *flags).stdout.strip()
    principal = ApiKeys(path).principal(key)
    assert principal.tenant == tenant
    assert "zh" in principal.rights.manage
    principal.require_manages()


def test_the_line_to_write_for_a_right_that_a_known_tenant_lacks(run, path):
    key = run("create", "--tenant", "acme.eu").stdout.strip()
    for flag, line in (("--manage", 'manage = "all"'), ("--operator", "operator = true")):
        refused = run("create", "--tenant", "acme.eu", flag)
        assert refused.exit_code == 1
        assert line in refused.stderr
        table, old = '[tenants."acme.eu"]', f"{line.split()[0]} = "
        assert table in refused.stderr
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line if one.startswith(old) else one for one in lines))
        assert run("create", "--tenant", "acme.eu", flag).exit_code == 0
    rights = ApiKeys(path).principal(key).rights
    assert rights.operator
    assert "zh" in rights.manage


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("list",), ("api_keys_file",)),
        (("revoke", "x"), ("keys.toml",)),
        (("create", "--tenant", "a b"), ("--tenant", "a b", "_")),
    ],
)
def test_errors_are_one_line(run, path, arguments, named):
    result = run(*arguments)
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
    assert result.stderr.count("\n") == 1
    assert not path.exists()


def test_the_file_may_be_in_the_environment(path):
    result = CliRunner().invoke(
        app, ["keys", "create", "--tenant", "x"], env={"LORAPLEX_API_KEYS_FILE": str(path)}
    )
    assert result.exit_code == 0
    assert path.exists()
