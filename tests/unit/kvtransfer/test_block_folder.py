"""Files of blocks: whole ones are read back, and nothing else is ever taken for one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.disk_messages import DiskBlock
from diptych.kvtransfer.disk.block_file import HEAD_BYTES, PROBE, BadBlockError, identity_of
from diptych.kvtransfer.disk.block_folder import BlockFolder, purge, tenants_in

SIZE = 500
IDENTITY = identity_of("model", 1)
ALICE, BOB = "a" * 32, "b" * 32


def block(number: int, tenant: str = ALICE, index: int | None = None) -> DiskBlock:
    return DiskBlock(number.to_bytes(16, "big"), tenant, number if index is None else index)


def content(number: int) -> bytearray:
    return bytearray(bytes([number]) * SIZE)


def opened(root: Path, identity: bytes = IDENTITY, size: int = SIZE, worker: str = "decode-0") -> BlockFolder:
    folder = BlockFolder(root, worker, identity, size)
    folder.found = folder.open()  # type: ignore[attr-defined]
    return folder


def write(folder: BlockFolder, *blocks: DiskBlock) -> None:
    for one in blocks:
        folder.sync([folder.write(one, [memoryview(content(one.key[-1]))])])


def read(folder: BlockFolder, one: DiskBlock) -> bytes:
    into = bytearray(SIZE)
    folder.read(one, [memoryview(into)])
    return bytes(into)


def bad(folder: BlockFolder, one: DiskBlock) -> str:
    with pytest.raises(BadBlockError) as error:
        read(folder, one)
    return error.value.reason


def path_of(root: Path, one: DiskBlock) -> Path:
    [path] = root.glob(f"*/*/{one.tenant}/{one.key.hex()}-*")
    return path


def test_a_block_is_read_back_also_by_the_next_process(tmp_path):
    first = opened(tmp_path)
    write(first, block(1), block(2, BOB))
    assert read(first, block(1)) == content(1)
    first.close()
    again = opened(tmp_path)
    assert sorted(again.found.blocks, key=lambda one: one.key) == [block(1), block(2, BOB)]
    assert (again.found.damaged, again.found.other_bytes) == ({}, 0)
    assert read(again, block(2, BOB)) == content(2)


def test_only_the_owner_may_look(tmp_path):
    write(opened(tmp_path / "kv"), block(1))
    for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_links_are_not_followed_and_another_users_root_is_refused(tmp_path, monkeypatch):
    """Whoever may write to the root could lead us, and our modes, elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "decode-0").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        opened(tmp_path / "kv")
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert not list(elsewhere.iterdir())
    if os.geteuid() == 0:  # a folder of root's is no other user's
        os.chown(tmp_path / "kv", 4712, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="another user, who may put links"):
        opened(tmp_path / "kv", worker="other")


def test_a_pipe_in_the_place_of_a_block_holds_nobody(tmp_path):
    folder = opened(tmp_path)
    write(folder, block(1))
    path = path_of(tmp_path, block(1))
    path.unlink()
    os.mkfifo(path)
    assert bad(folder, block(1)) == "truncated"


@pytest.mark.parametrize("of", ["block", "unfinished"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_folder_in_the_place_of_a_block_refuses_no_start_and_no_other_block(tmp_path, of, kept):
    """What is in it is not ours; an empty one is removed."""
    folder = opened(tmp_path)
    write(folder, block(1), block(2))
    path = path_of(tmp_path, block(1))
    path.unlink()
    if of == "unfinished":
        path = path.parent / f".{block(1).key.hex()}"
    path.mkdir()
    if kept:
        (path / "notes.txt").write_text("mine")
    if of == "block":
        assert bad(folder, block(1)) in ("truncated", "EISDIR")
        folder.remove(block(1))
        assert path.exists() is kept
        path.mkdir(exist_ok=True)
    folder.close()
    folder = opened(tmp_path)
    assert (folder.found.blocks, folder.found.damaged) == ((block(2),), {"foreign": 1})
    assert path.exists() is kept
    if kept:
        with pytest.raises(BadBlockError, match="EISDIR"):
            write(folder, block(1))
        assert [one.name for one in path.parent.iterdir() if one.name.startswith(".") and one != path] == []
        assert purge(tmp_path) == (1, HEAD_BYTES + SIZE)
        assert (path / "notes.txt").read_text() == "mine"
    else:
        path.mkdir()
        with pytest.raises(BadBlockError, match="EISDIR"):
            write(folder, block(1))
        write(folder, block(1))  # the empty one has gone
        assert read(folder, block(1)) == content(1)
    write(folder, block(3))
    assert read(folder, block(3)) == content(3)
    folder.close()
    opened(tmp_path, identity_of("model", 2)).close()  # another model removes what the first has left
    assert path.exists() is kept


def test_a_file_in_the_place_of_a_tenants_folder_concerns_no_other_tenant(tmp_path):
    folder = opened(tmp_path)
    (tmp_path / "decode-0" / IDENTITY.hex() / ALICE).write_text("")
    with pytest.raises(BadBlockError, match="ENOTDIR"):
        write(folder, block(1))
    write(folder, block(2, BOB))
    folder.close()
    assert opened(tmp_path).found.blocks == (block(2, BOB),)


def test_a_disk_that_takes_no_writes_any_more_serves_its_blocks(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    write(folder, block(1))

    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert read(folder, block(1)) == content(1)


def test_a_second_file_of_a_key_is_removed_at_the_start(tmp_path):
    """The account of blocks is by key: under another index, or of another tenant, a file would be in no bound."""
    folder = opened(tmp_path)
    write(folder, block(1), block(2))
    for at, path in enumerate((path_of(tmp_path, block(1)), path_of(tmp_path, block(2)))):
        os.utime(path, (1000 * at, 1000 * at))
    write(folder, block(1, index=7), block(1, BOB, index=3))
    for one, used in ((block(1, index=7), 9000), (block(1, BOB, index=3), 5000)):
        path = tmp_path / "decode-0" / IDENTITY.hex() / one.tenant / f"{one.key.hex()}-{one.index}"
        os.utime(path, (used, used))
    folder.close()
    again = opened(tmp_path)
    assert (again.found.blocks, again.found.damaged) == ((block(1, index=7), block(2)), {"foreign": 2})
    assert len(list(tmp_path.glob("*/*/*/*-*"))) == 2
    assert read(again, block(1, index=7)) == content(1)


def test_a_purge_while_a_worker_starts_does_not_refuse_it(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    write(folder, block(1), block(2))
    folder.close()
    listed, gone = Path.iterdir, path_of(tmp_path, block(1))

    def and_purged(path: Path) -> list[Path]:
        found = list(listed(path))
        if gone in found:
            gone.unlink()
        return found

    monkeypatch.setattr(Path, "iterdir", and_purged)
    assert opened(tmp_path).found.blocks == (block(2),)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="another user"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "at", [0, 9, 30, 41, 50, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + SIZE // 2, HEAD_BYTES + SIZE - 1]
)
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, at):
    folder = opened(tmp_path)
    write(folder, block(1))
    raw = bytearray(path_of(tmp_path, block(1)).read_bytes())
    raw[at] ^= 1
    path_of(tmp_path, block(1)).write_bytes(raw)
    assert bad(folder, block(1)) in ("corrupt", "foreign")


@pytest.mark.parametrize("left", [0, 10, HEAD_BYTES, HEAD_BYTES + SIZE - 1, HEAD_BYTES + SIZE + 1])
def test_a_file_of_another_size_is_noticed_at_once_and_at_the_next_start(tmp_path, left):
    folder = opened(tmp_path)
    write(folder, block(1))
    os.truncate(path_of(tmp_path, block(1)), left)
    assert bad(folder, block(1)) == "truncated"
    folder.close()
    again = opened(tmp_path)
    assert (again.found.blocks, again.found.damaged) == ((), {"truncated": 1})
    assert bad(again, block(1)) == "missing"


def test_two_files_that_were_swapped_are_none(tmp_path):
    folder = opened(tmp_path)
    write(folder, block(1), block(2, BOB))
    one, two = path_of(tmp_path, block(1)), path_of(tmp_path, block(2, BOB))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert [bad(folder, block(1)), bad(folder, block(2, BOB))] == ["foreign", "foreign"]


def test_a_file_of_another_model_is_none(tmp_path):
    other = opened(tmp_path, identity_of("model", 2), worker="decode-1")
    write(other, block(1))
    folder = opened(tmp_path)
    write(folder, block(1))
    [foreign] = tmp_path.glob(f"decode-1/*/*/{block(1).key.hex()}-1")
    [mine] = tmp_path.glob(f"decode-0/*/*/{block(1).key.hex()}-1")
    mine.write_bytes(foreign.read_bytes())
    assert bad(folder, block(1)) == "foreign"


def test_what_another_model_left_is_removed_and_what_is_not_ours_stays(tmp_path):
    other = opened(tmp_path, identity_of("model", 2))
    write(other, block(1))
    other.close()
    notes = tmp_path / "decode-0" / "notes.txt"
    notes.write_text("mine")
    folder = opened(tmp_path)
    assert folder.found.blocks == ()
    assert folder.found.other_bytes == HEAD_BYTES + SIZE
    assert [path.name for path in (tmp_path / "decode-0").iterdir() if path.is_dir()] == [IDENTITY.hex()]
    assert notes.read_text() == "mine"


def test_a_link_in_the_place_of_a_block_is_not_followed(tmp_path):
    folder = opened(tmp_path)
    write(folder, block(1))
    path = path_of(tmp_path, block(1))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert bad(folder, block(1)) == "ELOOP"


def test_two_processes_never_share_a_folder(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match="another process uses it"):
        opened(tmp_path)
    opened(tmp_path, worker="decode-1").close()
    first.close()
    opened(tmp_path).close()


def test_a_worker_whose_folder_was_removed_takes_it_again(tmp_path):
    """The lock goes with the folder: a second process would get another one."""
    first = opened(tmp_path)
    write(first, block(1))
    shutil.rmtree(tmp_path / "decode-0")
    assert bad(first, block(1)) == "missing"
    write(first, block(2))
    assert read(first, block(2)) == content(2)
    with pytest.raises(ConfigError, match="another process uses it"):
        opened(tmp_path)
    for path in (tmp_path / "decode-0").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_another_process_took_after_a_removal_is_its_own(tmp_path):
    first = opened(tmp_path)
    write(first, block(1))
    shutil.rmtree(tmp_path / "decode-0")
    second = opened(tmp_path)
    write(second, block(2))
    for action in (lambda: write(first, block(3)), lambda: first.remove(block(2))):
        with pytest.raises(OSError, match="another process has taken") as error:
            action()
        assert error.value.errno == errno.EBUSY
    assert read(second, block(2)) == content(2)
    assert bad(second, block(3)) == "missing"
    # once that one has ended, what it leaves is in nobody's account
    second.close()
    write(first, block(3))
    assert read(first, block(3)) == content(3)
    assert bad(first, block(2)) == "missing"
    first.close()
    assert opened(tmp_path).found.blocks == (block(3),)


def test_after_the_end_nothing_is_written_or_removed(tmp_path):
    """The writer may still be at it when the worker's time to end is over, and the next process has begun."""
    folder = opened(tmp_path)
    write(folder, block(1))
    folder.close()
    for action in (lambda: write(folder, block(2)), lambda: folder.remove(block(1))):
        with pytest.raises(OSError, match="file descriptor"):
            action()
    assert opened(tmp_path).found.blocks == (block(1),)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_kv_dir"):
        opened(tmp_path / "file")


KILLED = """
import sys
from pathlib import Path
from diptych.engine.disk_messages import DiskBlock
from diptych.kvtransfer.disk.block_folder import BlockFolder
root, identity, size = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
folder = BlockFolder(root, "decode-0", identity, size)
folder.open()
def write(number):
    folder.sync([folder.write(DiskBlock(number.to_bytes(16, "big"), "a" * 32, number), [memoryview(bytes([number]) * size)])])
write(1)
def hold(name):
    print("written, not renamed", flush=True)
    sys.stdin.read()
folder.before_rename = hold
write(2)
"""


def test_a_kill_in_the_middle_of_a_write_leaves_whole_blocks_only(tmp_path):
    arguments = [str(tmp_path), IDENTITY.hex(), str(SIZE)]
    with subprocess.Popen(  # ends: with its stdin
        [sys.executable, "-P", "-c", KILLED, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written, not renamed\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/*/*/.*"))) == 1
    folder = opened(tmp_path)
    assert (folder.found.blocks, folder.found.damaged) == ((block(1),), {"unfinished": 1})
    assert not list(tmp_path.glob("*/*/*/.*"))
    assert read(folder, block(1)) == content(1)
    assert bad(folder, block(2)) == "missing"


def test_what_was_used_last_comes_first_and_of_one_prompt_the_first_block(tmp_path):
    folder = opened(tmp_path)
    write(folder, *(block(number) for number in range(6)))
    for number, used in enumerate(
        (1000, 1001, 1002, 9000, 9001, 9002)
    ):  # a prompt of three blocks long ago, and one lately
        os.utime(path_of(tmp_path, block(number)), (used, used))
    folder.close()
    assert [one.index for one in opened(tmp_path).found.blocks] == [3, 4, 5, 0, 1, 2]


def test_reading_counts_as_use(tmp_path):
    folder = opened(tmp_path)
    write(folder, block(1), block(2))
    for number in (1, 2):
        os.utime(path_of(tmp_path, block(number)), (1000, 1000))
    read(folder, block(2))
    folder.close()
    assert opened(tmp_path).found.blocks == (block(2), block(1))


def test_purge_removes_a_tenant_of_every_worker_and_no_other(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path, worker="prefill-0")
    write(one, block(1), block(2, BOB))
    write(two, block(3), block(4))
    listed = {(part.worker, part.tenant): part.num_blocks for part in tenants_in(tmp_path)}
    assert listed == {("decode-0", ALICE): 1, ("decode-0", BOB): 1, ("prefill-0", ALICE): 2}
    assert purge(tmp_path, ALICE) == (3, 3 * (HEAD_BYTES + SIZE))
    assert bad(one, block(1)) == "missing"
    assert read(one, block(2, BOB)) == content(2)
    write(one, block(5))  # the worker goes on
    assert read(one, block(5)) == content(5)
    assert purge(tmp_path) == (2, 2 * (HEAD_BYTES + SIZE))
    assert list(tenants_in(tmp_path)) == []


def test_purge_leaves_what_is_not_ours(tmp_path):
    write(opened(tmp_path), block(1))
    notes = path_of(tmp_path, block(1)).parent / "notes.txt"
    notes.write_text("mine")
    assert purge(tmp_path)[0] == 1
    assert notes.read_text() == "mine"


def test_blocks_of_the_probe_are_never_found(tmp_path):
    folder = opened(tmp_path)
    write(folder, block(1, PROBE))
    folder.close()
    assert opened(tmp_path).found.blocks == ()


def test_the_identity_is_of_every_part():
    assert len({identity_of("ab", "c"), identity_of("a", "bc"), identity_of("abc"), identity_of("ab", b"c", 1)}) == 4
