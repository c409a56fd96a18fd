from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.main import build_app
from diptych.cli.router_access import RouterAccess, router_access
from diptych.cli.settings.merge import log_line
from diptych.cli.status_client import StatusClient
from diptych.cli.up.config import UpConfig
from diptych.cli.up.processes import ProcessIdentity, tail
from diptych.cli.up.run_folder import ChildState, ClusterState, RunFolder
from diptych.common.errors import ConfigError, NoWorkerError


def make_state(**changes) -> ClusterState:
    child = ChildState("decode-0", "decode", 7, 1.5, "127.0.0.1:9", "x.log")
    values = {
        "pid": 1, "start_time": 2.0, "ready": True, "http_url": "http://h:1", "grpc_address": "h:2", "redis_url": "redis://h",
        "model": "m", "children": [child],
    }  # fmt: skip
    return ClusterState(**(values | changes))


def test_one_owner_at_a_time(tmp_path: Path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.claim()
    with pytest.raises(ConfigError, match="a cluster runs from this folder already"):
        second.claim()
    assert second.owner() == ProcessIdentity.of(os.getpid())
    first.release()
    assert second.owner() is None
    second.claim()
    second.release()


def test_a_refused_start_leaves_no_folder_that_was_not_there(tmp_path: Path):
    for there in (False, True):
        root = tmp_path / "run"
        if there:
            root.mkdir()
        folder = RunFolder(root)
        folder.claim()
        folder.release()
        assert root.exists() is there
    folder = RunFolder(tmp_path / "other")
    folder.claim()
    (folder.logs / "redis.log").write_text("kept")
    folder.release()
    assert [file.name for file in folder.logs.iterdir()] == ["redis.log"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_other_users_cannot_write_in_the_folder_nor_read_its_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.claim()
    folder.write_state(make_state(redis_url="redis://:hush@h"))
    assert (mode_of(folder.root), mode_of(folder.state_file)) == (0o700, 0o600)
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o775)
    RunFolder(there).claim()
    assert mode_of(there) == 0o755
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="run_dir.*other users can write in it"):
        RunFolder(shared).claim()
    assert mode_of(shared) == 0o1777


@pytest.mark.parametrize("read", [RunFolder.read_state, RunFolder.owner])
def test_the_folder_of_another_user_is_named(tmp_path: Path, monkeypatch, read) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="run_dir.*another user's cluster.*DIPTYCH_RUN_DIR"):
        read(RunFolder(tmp_path))


def test_a_command_without_a_cluster_names_the_address_it_tries(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("DIPTYCH_RUN_DIR", str(tmp_path / "none"))
    assert router_access().address == "127.0.0.1:50050"
    reported = capsys.readouterr().err
    assert f"no cluster runs from {tmp_path / 'none'}: using the default address 127.0.0.1:50050 (--address" in reported
    router_access("a:1")
    assert not capsys.readouterr().err
    with pytest.raises(NoWorkerError, match=r"the router at http://127.0.0.1:9 cannot be reached: Connection refused"):
        StatusClient("http://127.0.0.1:9").get()


def test_a_command_that_changes_something_takes_no_default_address(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("DIPTYCH_RUN_DIR", str(tmp_path / "none"))
    refused = CliRunner().invoke(build_app("role"), ["role", "decode-0", "prefill"]).exception
    assert isinstance(refused, ConfigError)
    assert f"no cluster runs from {tmp_path / 'none'}: name the router of the one to change (--url)" in str(refused)
    refused = CliRunner().invoke(build_app("move"), ["move", "req-1"]).exception
    assert isinstance(refused, ConfigError)
    assert "name a router (--address)" in str(refused)
    assert StatusClient().url == "http://127.0.0.1:8000"
    assert "using the default address http://127.0.0.1:8000 (--url" in capsys.readouterr().err
    RunFolder(tmp_path).write_state(make_state())
    monkeypatch.setenv("DIPTYCH_RUN_DIR", str(tmp_path))
    assert StatusClient(changes=True).url == make_state().http_url


def test_release_leaves_logs_only(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.claim()
    folder.write_state(make_state())
    folder.secret.write_text("x")
    (folder.logs / "a.log").write_text("kept")
    folder.release()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (folder.logs / "a.log").read_text() == "kept"


def test_state_round_trip(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_state() is None
    folder.write_state(make_state())
    assert folder.read_state() == make_state()


def test_what_a_killed_supervisor_left_is_removed(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.pid_file.write_text('{"pid": 1, "start_time": 0.0}')
    folder.write_state(make_state())
    assert folder.owner() is None  # the lock is free, whatever the file says
    assert folder.remove_dead_cluster()
    assert list(tmp_path.iterdir()) == []
    assert not folder.remove_dead_cluster()


def test_another_process_with_the_same_pid_is_not_ours():
    me = ProcessIdentity.of(os.getpid())
    assert me.alive()
    assert not ProcessIdentity(me.pid, me.start_time - 100.0).alive()


def test_tail(tmp_path: Path):
    path = tmp_path / "x.log"
    assert tail(path) == ""
    path.write_text("\n".join(str(i) for i in range(100)))
    assert tail(path, 2) == "98\n99"


def test_a_tail_leaves_out_the_settings_of_the_start(tmp_path: Path):
    path = tmp_path / "x.log"
    path.write_text(log_line("up", UpConfig()) + '\n{"event": "it cannot start"}\n')
    assert tail(path) == '{"event": "it cannot start"}'


def test_the_cluster_here_says_how_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_RUN_DIR", str(tmp_path))
    folder = RunFolder(tmp_path)
    folder.write_state(make_state(tls_cert="/c.pem"))
    assert router_access() == RouterAccess("h:2", Path("/c.pem"))
    assert router_access(tls_ca=Path("/mine.pem"), server_name="n") == RouterAccess("h:2", Path("/mine.pem"), "n")
    assert router_access("other:1") == RouterAccess("other:1")
    with pytest.raises(ConfigError, match="tls_ca"):
        router_access().tls()
    folder.write_state(make_state())
    assert router_access().tls() is None
