"""`diptych keys`, and other options for access control."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.main import build_app
from diptych.cli.router_access import RouterAccess
from diptych.cli.up.config import UpConfig
from diptych.common.errors import ConfigError
from diptych.router.api.auth.keys import load_keys


def test_add_list_revoke(tmp_path: Path) -> None:
    file = ["--keys-file", str(tmp_path / "keys.json")]
    runner = CliRunner()
    added = runner.invoke(build_app(), ["keys", "add", "acme", "--tokens-per-minute", "60", "--note", "mine", *file])
    assert added.exit_code == 0, added.output
    key = added.stdout.strip().splitlines()[-1]
    (entry,) = load_keys(tmp_path / "keys.json").entries.values()
    assert load_keys(tmp_path / "keys.json").find(key) == entry
    listed = runner.invoke(build_app(), ["keys", "list", *file]).stdout
    assert listed.startswith(f"{entry.id}  acme  ")
    assert listed.endswith("60 tokens/min  mine\n")
    assert key not in listed
    assert runner.invoke(build_app(), ["keys", "revoke", entry.id, *file]).exit_code == 0
    assert runner.invoke(build_app(), ["keys", "list", *file]).stdout == ""
    assert isinstance(runner.invoke(build_app(), ["keys", "revoke", entry.id, *file]).exception, ConfigError)


def test_a_key_names_its_adapters_and_may_be_an_admins(tmp_path: Path) -> None:
    file = ["--keys-file", str(tmp_path / "keys.json")]
    runner = CliRunner()
    flags = ["--adapter", "poems", "--adapter", "prose", "--admin"]
    assert runner.invoke(build_app(), ["keys", "add", "acme", *flags, *file]).exit_code == 0
    keys = load_keys(tmp_path / "keys.json")
    (entry,) = keys.entries.values()
    assert (entry.adapters, entry.admin) == (("poems", "prose"), True)
    assert "admin, adapters poems prose" in runner.invoke(build_app(), ["keys", "list", *file]).stdout
    assert [keys.may_use_adapter("acme", name) for name in ("poems", "prose", "other")] == [True, True, False]
    assert keys.may_use_adapter("another", "other"), "no key of this tenant lists any"
    refused = runner.invoke(build_app(), ["keys", "add", "acme", "--adapter", "prose", "--adapter", "../x", *file])
    assert isinstance(refused.exception, ConfigError)
    assert "'../x'" in str(refused.exception)
    assert "the first a letter or digit" in str(refused.exception), "not that there are too many"


def test_up_is_not_reachable_by_accident() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        UpConfig(host="0.0.0.0")
    assert UpConfig(host="0.0.0.0", insecure=True).insecure
    some = Path("some.pem")
    with pytest.raises(ConfigError, match="--insecure"):
        UpConfig(host="0.0.0.0", keys_file=some)
    UpConfig(host="0.0.0.0", keys_file=some, tls_cert=some, tls_key=some)
    with pytest.raises(ConfigError, match="set together"):
        UpConfig(tls_cert=some)


def test_chat_names_a_file_that_is_not_there_or_holds_no_certificate(tmp_path: Path) -> None:
    """Of the latter it said that nobody answers at the address."""
    no_pem = tmp_path / "notes.txt"
    no_pem.write_text("not a certificate")
    for file in (tmp_path / "none.pem", no_pem):
        with pytest.raises(ConfigError, match="tls_ca"):
            RouterAccess("127.0.0.1:9", tls_ca=file).tls()
