"""Manifest, fingerprint and kept hashes of a checkpoint (17: Checkpoints, Bad input)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.common.block_identity import IdentityHeader, block_keys
from diptych.common.checkpoint import hashing as module
from diptych.common.checkpoint.hashing import (
    CheckpointHash,
    expected_fingerprint,
    model_fingerprint,
    renew_manifest,
)
from diptych.common.checkpoint.manifest import MANIFEST_FILE, check_contents, read_manifest
from diptych.common.errors import ConfigError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEADER = IdentityHeader(key=bytes(32), model_revision="", tokenizer_revision="t", kv_rule="float32", block_size=16)


def write_shard(file: Path, data: bytes, name: str) -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def folder(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    target = shutil.copytree(make_model(), tmp_path / "model")
    for i, name in enumerate(SHARDS):
        write_shard(target / name, bytes(range(256)) * 64, f"w{i}")
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(SHARDS)}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in target.iterdir():
        os.utime(file, (1e9, 1e9))  # long settled
    return target


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Callable[..., tuple[str, int]]:
    """start(...) -> (fingerprint, bytes hashed), keeping hashes of a checkpoint of any size."""

    def run(at: Path = folder, **options: Any) -> tuple[str, int]:
        with CheckpointHash(at, cache=tmp_path / "cache", least_kept_bytes=0, **options) as hashing:
            return hashing.manifest().fingerprint, hashing.hashed_bytes

    return run


def flip(file: Path, at: int = -1) -> None:
    """One byte, in place."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    with file.open("r+b") as target:
        target.write(raw)


def flip_unseen(file: Path) -> None:
    """Size, mtime and inode stay."""
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    facts = ("st_size", "st_mtime_ns", "st_ino")
    assert [getattr(after, fact) for fact in facts] == [getattr(before, fact) for fact in facts]


def test_a_copy_with_other_times_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    os.utime(copy / SHARDS[0], (1, 1))
    assert model_fingerprint(copy) == model_fingerprint(folder)
    assert len(model_fingerprint(folder)) == 32


@pytest.mark.parametrize("at", [-1, 8_000], ids=["end", "middle"])
def test_one_byte_of_the_weights_is_another_model_and_shares_no_block_key(
    folder: Path, tmp_path: Path, at: int
) -> None:
    other = shutil.copytree(folder, tmp_path / "fine-tune")
    flip(other / SHARDS[1], at)
    one, two = (replace(HEADER, model_revision=model_fingerprint(path)) for path in (folder, other))
    assert one.model_revision != two.model_revision
    tokens = list(range(512))
    assert not set(block_keys(one, tokens)) & set(block_keys(two, tokens))


def test_config_is_part_of_the_fingerprint_and_the_tokenizer_is_not(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "chat_template.jinja").write_text("other")
    assert model_fingerprint(folder) == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert model_fingerprint(folder) != before


def test_hashes_are_kept_and_taken_again_when_a_fact_of_the_file_changed(
    folder: Path, start: Callable[..., tuple[str, int]]
) -> None:
    total = sum(file.stat().st_size for file in folder.iterdir())
    first, hashed = start()
    assert hashed == total
    assert start() == (first, 0)
    shard = folder / SHARDS[0]
    os.utime(shard, (1.1e9, 1.1e9))  # mtime alone
    assert start() == (first, shard.stat().st_size)
    assert start() == (first, 0)
    again = folder / "again"
    shutil.copy2(shard, again)  # inode alone
    again.replace(shard)
    assert start() == (first, shard.stat().st_size)
    flip(shard)
    os.utime(shard, (1.2e9, 1.2e9))
    changed, hashed = start()
    assert changed != first
    assert hashed == shard.stat().st_size


def test_always_finds_what_kept_size_mtime_and_inode(folder: Path, start: Callable[..., tuple[str, int]]) -> None:
    first, total = start()
    flip_unseen(folder / SHARDS[1])
    assert start() == (first, 0)  # what `changed` cannot see
    found, hashed = start(verify="always")
    assert found != first
    assert hashed == total
    assert start() == (found, 0)  # and is known from then on


def test_a_file_that_was_just_written_is_hashed_again(folder: Path, start: Callable[..., tuple[str, int]]) -> None:
    """It may change again within the resolution of its mtime."""
    first, _ = start()
    os.utime(folder / SHARDS[0])
    size = (folder / SHARDS[0]).stat().st_size
    os.utime(folder / SHARDS[0], (4e9, 4e9))  # a clock that is ahead
    assert start() == (first, size)
    assert start() == (first, size)


def test_workers_that_start_together_hash_once(
    folder: Path, tmp_path: Path, start: Callable[..., tuple[str, int]]
) -> None:
    lock = module._kept_file(folder, tmp_path / "cache").with_suffix(".lock")
    with CheckpointHash(folder, verify="always", cache=tmp_path / "cache", least_kept_bytes=0) as one:
        with module._lock(lock, one._stop):
            second = CheckpointHash(folder, cache=tmp_path / "cache", least_kept_bytes=0)
            expected = one.manifest()
            assert second._thread.is_alive()  # until the lock is free
        with second:
            assert second.manifest() == expected
            assert second.hashed_bytes == 0


def test_a_start_that_is_given_up_ends_its_thread_while_it_waits(folder: Path, tmp_path: Path) -> None:
    lock = module._kept_file(folder, tmp_path / "cache").with_suffix(".lock")
    with CheckpointHash(folder) as one, module._lock(lock, one._stop):
        with CheckpointHash(folder, cache=tmp_path / "cache", least_kept_bytes=0) as second:
            pass
        assert not second._thread.is_alive()


def test_a_small_checkpoint_leaves_nothing_in_the_cache_and_nothing_in_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    files = sorted(folder.iterdir())
    model_fingerprint(folder)
    with CheckpointHash(folder, least_kept_bytes=0) as hashing:
        hashing.manifest()
    assert len(list((tmp_path / "xdg" / "diptych" / "weight-hashes").iterdir())) == 2  # hashes and lock
    assert sorted(folder.iterdir()) == files
    shutil.rmtree(tmp_path / "xdg")
    model_fingerprint(folder)
    assert not (tmp_path / "xdg").exists()


@pytest.mark.parametrize("broken", ["a file", "not JSON", "other types"])
def test_a_cache_that_cannot_be_used_means_hashing_again(
    folder: Path, tmp_path: Path, start: Callable[..., tuple[str, int]], broken: str
) -> None:
    expected = model_fingerprint(folder)
    total = sum(file.stat().st_size for file in folder.iterdir())
    if broken == "a file":
        (tmp_path / "cache").write_text("in the way")
    else:
        start()
        [kept] = (tmp_path / "cache").glob("*.json")
        kept.write_text("{" if broken == "not JSON" else '{"folder": 1, "files": []}')
    assert start() == (expected, total)


def test_a_file_that_changes_while_it_is_loaded_is_named(folder: Path) -> None:
    with CheckpointHash(folder) as hashing:
        hashing._thread.join()
        os.utime(folder / SHARDS[1], (2e9, 2e9))
        with pytest.raises(ConfigError, match=SHARDS[1]) as caught:
            hashing.manifest()
        assert "changed while it was loaded" in str(caught.value)


def test_a_folder_without_weights_or_config_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="verify_weights"):
        CheckpointHash(folder, verify="never")
    (folder / SHARDS[0]).unlink()
    with pytest.raises(ConfigError, match=SHARDS[0]):
        CheckpointHash(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        CheckpointHash(folder)


# ---- the folder's own manifest ----


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[1], "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [(truncated, "bytes; diptych-manifest.json says"), (flip, "BLAKE3"), (Path.unlink, "missing")],
    ids=["truncated", "one byte", "removed"],
)
def test_what_differs_from_the_manifest_is_refused_by_name(
    folder: Path, start: Callable[..., tuple[str, int]], name: str, change: Callable[[Path], None], rule: str
) -> None:
    renew_manifest(folder)
    assert start()[0] == model_fingerprint(folder)
    change(folder / name)
    with pytest.raises(ConfigError) as caught:
        start()
    assert str(folder / name) in str(caught.value) or (rule == "missing" and name in str(caught.value))
    assert rule in str(caught.value) or (rule == "missing" and "config.json" in str(caught.value))


def test_a_file_that_the_manifest_does_not_name_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    renew_manifest(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja.*is not in diptych-manifest"):
        CheckpointHash(folder)


def test_kept_hashes_do_not_hide_a_manifest_of_other_content(
    folder: Path, tmp_path: Path, start: Callable[..., tuple[str, int]]
) -> None:
    other = shutil.copytree(folder, tmp_path / "fine-tune")
    flip(other / SHARDS[0])
    renew_manifest(other)
    start()
    shutil.copy(other / MANIFEST_FILE, folder)
    with pytest.raises(ConfigError, match=f"{SHARDS[0]}.*BLAKE3"):
        start()


def test_a_file_that_was_repaired_in_place_is_served_at_the_next_start(
    folder: Path, start: Callable[..., tuple[str, int]]
) -> None:
    good = renew_manifest(folder).fingerprint
    shard = folder / SHARDS[0]
    flip_unseen(shard)
    for _ in range(2):  # a refusal is no reason to forget the hash, and a kept one is none to refuse
        with pytest.raises(ConfigError, match=f"{SHARDS[0]}.*BLAKE3"):
            start()
    flip_unseen(shard)
    assert start() == (good, shard.stat().st_size)
    assert start() == (good, 0)


def test_the_manifest_is_renewed_for_what_lies_there(folder: Path) -> None:
    first = renew_manifest(folder)
    assert read_manifest(folder) == first
    flip(folder / SHARDS[0])
    second = renew_manifest(folder)
    assert second.fingerprint != first.fingerprint
    assert model_fingerprint(folder) == second.fingerprint
    assert json.loads((folder / MANIFEST_FILE).read_text())["fingerprint"] == second.fingerprint
    with pytest.raises(ConfigError, match=SHARDS[0]):
        check_contents(folder, first, second)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "not a manifest"),
        ('{"version": 1, "fingerprint": "x", "files": {"a": 1}}', "not a manifest"),
        ('{"version": 2, "fingerprint": "x", "files": {}}', "version 2"),
        ('{"version": 1, "fingerprint": "x", "files": {}}', "edited or cut off"),
    ],
)
def test_a_broken_manifest_is_refused(folder: Path, text: str, rule: str) -> None:
    (folder / MANIFEST_FILE).write_text(text)
    with pytest.raises(ConfigError, match=rule):
        CheckpointHash(folder)
    with pytest.raises(ConfigError, match=rule):
        expected_fingerprint(folder)


def test_a_router_knows_the_fingerprint_by_manifest_or_weights_and_else_learns_it(folder: Path) -> None:
    fingerprint = model_fingerprint(folder)
    assert expected_fingerprint(folder) == fingerprint
    renew_manifest(folder)
    for name in (*SHARDS, "model.safetensors.index.json"):
        (folder / name).unlink()
    assert expected_fingerprint(folder) == fingerprint  # no weights here
    flip(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        expected_fingerprint(folder)
    (folder / MANIFEST_FILE).unlink()
    assert expected_fingerprint(folder) == ""
