"""`diptych cache`: what lies in files, and that a purge removes what it names and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from diptych.cli.main import build_app
from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret, further_salt, tenant_folder, tenant_of, tenant_salt
from diptych.engine.disk_messages import DiskBlock
from diptych.kvtransfer.disk import mooncake
from diptych.kvtransfer.disk.block_file import identity_of
from diptych.kvtransfer.disk.block_folder import BlockFolder


def cache(*arguments: str) -> Result:
    return CliRunner().invoke(build_app("cache"), ["cache", *arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three blocks of alice, one of them under a salt of her client's, and one of bob."""
    secret = create_secret(tmp_path / "secret")
    salts = [tenant_salt(secret, "alice")] * 2
    salts += [further_salt(salts[0], "a conversation"), tenant_salt(secret, "bob")]
    folder = BlockFolder(tmp_path / "kv", "decode-0", identity_of("m"), 100)
    folder.open()
    for number, salt in enumerate(salts):
        block = DiskBlock(number.to_bytes(16, "big"), tenant_folder(tenant_of(salt)), number)
        folder.write(block, [memoryview(bytes(100))])
    folder.close()
    return tmp_path / "kv"


def test_list(root: Path) -> None:
    lines = cache("list", "--disk-kv-dir", str(root)).stdout.splitlines()
    assert sorted(line.split("  ")[3] for line in lines) == ["1 blocks", "3 blocks"]
    assert all(line.startswith("decode-0  ") for line in lines)
    assert "alice" not in "".join(lines)


def test_purge_of_one_tenant_and_of_all(root: Path) -> None:
    here = ["--disk-kv-dir", str(root)]
    secret = ["--secret-file", str(root.parent / "secret"), *here]
    assert cache("purge", "--tenant", "alice", *secret).stdout == f"removed 3 blocks, {3 * 164} bytes\n"
    assert [line.split("  ")[3] for line in cache("list", *here).stdout.splitlines()] == ["1 blocks"]
    assert cache("purge", *here).stdout == "removed 1 blocks, 164 bytes\n"
    assert cache("list", *here).stdout == ""


def test_a_purge_of_a_tenant_without_blocks_says_so_and_fails(root: Path) -> None:
    """A name that is mistyped would leave all that was to go."""
    purge = ["purge", "--disk-kv-dir", str(root), "--secret-file", str(root.parent / "secret"), "--tenant"]
    for tenant in ("nobody", "Alice"):
        result = cache(*purge, tenant)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception) == f"tenant={tenant!r}: has no blocks in {root}"
        assert result.exit_code == 1
    assert len(list(root.glob("*/*/*/*-*"))) == 4


class Store:
    """Of a Mooncake client, what a purge uses."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.is_closed, self.code = names, False, 0

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        assert force, "what was read a moment ago would stay"
        found = [name for name in self.names if re.search(regex_pattern, name)]
        self.names[:] = [name for name in self.names if name not in found]
        return self.code or len(found)

    def close(self) -> int:
        self.is_closed = True
        return 0


def test_purge_of_a_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = root.parent / "secret"
    alice, bob = (
        tenant_folder(tenant_of(tenant_salt(bytes.fromhex(secret.read_text().strip()), name)))
        for name in ("alice", "bob")
    )
    names = [f"diptych/{identity_of(model).hex()}/{tenant}/{'0' * 32}-0" for model in "mn" for tenant in (alice, bob)]
    others = [f"another/{alice}/x", f"x/diptych/{identity_of('m').hex()}/{alice}/y"]
    store = Store([*names, *others])
    asked: list[str] = []
    monkeypatch.setattr(mooncake, "connect", lambda url, block_bytes: asked.append(url) or store)
    here = ["purge", "--kv-store", "mooncake://h:1"]
    one = [*here, "--secret-file", str(secret), "--tenant"]
    assert cache(*one, "alice").stdout == "removed 2 blocks\n"
    assert store.is_closed
    assert set(store.names) == {name for name in names if bob in name} | set(others)
    error = cache(*one, "alice").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "tenant='alice': has no blocks in mooncake://h:1"
    assert cache(*here).stdout == "removed 2 blocks\n"
    assert cache(*here).stdout == "removed 0 blocks\n"
    assert store.names == others
    assert set(asked) == {"mooncake://h:1"}
    store.code = -5
    error = cache(*here).exception
    assert isinstance(error, ConfigError)
    assert (error.field, error.rule) == ("kv_store", "cannot be purged: the store answers -5")


def test_a_purge_is_of_a_folder_or_of_a_store(root: Path) -> None:
    for arguments in ([], ["--disk-kv-dir", str(root), "--kv-store", "mooncake://h:1"]):
        error = cache("purge", *arguments).exception
        assert isinstance(error, ConfigError)
        assert error.field == "disk_kv_dir"


def test_what_is_missing_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_RUN_DIR", str(tmp_path / "nothing-runs-here"))
    for arguments, name in (
        (["purge", "--disk-kv-dir", str(root), "--tenant", "alice"], "secret_file"),
        (["purge", "--disk-kv-dir", str(root / "x")], "disk_kv_dir"),
        (["list", "--disk-kv-dir", str(root / "x")], "disk_kv_dir"),
    ):
        error = cache(*arguments).exception
        assert isinstance(error, ConfigError)
        assert error.field == name
    assert cache("list").exit_code == 2
