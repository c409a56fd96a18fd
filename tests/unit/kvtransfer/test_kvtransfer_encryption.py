"""KV on its way between workers, encrypted: what is on the wire, what passes, and which settings are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.compat import Compat, differences, facts
from diptych.common.errors import ConfigError
from diptych.common.kv_format import full_format
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric.registry import transports
from diptych.kvtransfer.fabric.transport import NoteArrived, ReceiveDone, RequestArrived, SendDone
from diptych.kvtransfer.slabs.handle import Refusal, SlabHandle, encode
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring, RingSpec, message_bytes, read_refusal, refusal_message
from diptych.kvtransfer.transports.inproc import InprocTransport
from diptych.kvtransfer.wrappers import encryption
from diptych.kvtransfer.wrappers.ciphers import CIPHERS, OFF
from diptych.kvtransfer.wrappers.encryption import OVERHEAD_BYTES, EncryptedTransport, Opener, Sealer
from diptych.worker.config import WorkerConfig

SECRET = b"s" * 32
SIZE = 1000
NAMED = SlabHandle("p0", "life1", "att", 1, 1, 0, 16, 0, 2, 7, SIZE, 5, 99, mac=b"m" * 32)
LIVES = ("p0@life1", "d0@life1")


class Wire(InprocTransport):
    """Keeps what is sent through it, and can change the next answer."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id, "life1")
        self.sent: list[tuple[str, bytes]] = []
        self.flip = -1

    def _post(self, name: bytes, kind: str, read_id: int, body: bytes) -> bool:
        self.sent.append((kind, body))
        if kind == "answer" and self.flip >= 0:
            raw = bytearray(body)
            raw[self.flip % len(raw)] ^= 1
            body = bytes(raw)
        return super()._post(name, kind, read_id, body)

    def kinds(self, kind: str) -> list[bytes]:
        return [body for name, body in self.sent if name == kind]


class Ends:
    """Both ends of one wire, on one thread."""

    def __init__(self, handle, cipher: str = "aes-gcm", *, secret: bytes = SECRET) -> None:
        self.p_wire, self.d_wire = Wire("p0"), Wire("d0")
        self.p = EncryptedTransport(self.p_wire, cipher, secret=SECRET, me=LIVES[0])
        self.d = EncryptedTransport(self.d_wire, cipher, secret=secret, me=LIVES[1])
        self.out, self.into = Ring(RingSpec(2, 4096)), Ring(RingSpec(2, 4096))
        self.p.register(self.out)
        self.d.register(self.into)
        self.key = self.d.connect(PeerRef("p0", "life1", self.p.address))
        self.handle = encode(handle(size_bytes=SIZE))
        self.out.message(1, SIZE)[:] = np.arange(message_bytes(SIZE)) % 251

    def ask(self, read_id: int = 1) -> list:
        """Decode's request, as prefill sees it."""
        self.d.read(self.key, read_id, self.handle, self.into.message(0, SIZE))
        return [event for event in self.p.progress() if not isinstance(event, SendDone)]

    def fetch(self, read_id: int = 1) -> ReceiveDone:
        (asked,) = self.ask(read_id)
        self.p.answer(asked.conn, read_id, self.out.message(1, SIZE))
        (done,) = self.d.progress()
        assert isinstance(done, ReceiveDone)
        return done

    def arrived(self) -> bool:
        return np.array_equal(self.out.message(1, SIZE), self.into.message(0, SIZE))


@pytest.mark.parametrize("cipher", CIPHERS)
def test_a_slab_arrives_and_nothing_of_it_is_on_the_wire(handle, cipher):
    ends = Ends(handle, cipher)
    assert ends.ask()[0].body == ends.handle
    ends.p.answer(LIVES[1], 1, ends.out.message(1, SIZE))
    assert ends.d.progress() == [ReceiveDone(1)]
    assert ends.arrived()
    ends.d.notify(ends.key, ends.handle)
    assert ends.p.progress() == [SendDone(1, True), NoteArrived(LIVES[1], ends.handle)]
    sent = [body for kind, body in (*ends.p_wire.sent, *ends.d_wire.sent) if kind != "hello"]
    assert len(sent) == 3
    plain = [ends.out.message(1, SIZE).tobytes(), ends.handle]
    for body in sent:
        for text in plain:
            assert not any(text[at : at + 16] in body for at in range(0, len(text) - 16, 16))


@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_format_is_the_documented_one(handle, cipher):
    """Opened by other code: HKDF-SHA256 over both lives, a counter as nonce, the read and the handle as associated data."""
    ends = Ends(handle, cipher)
    assert ends.fetch(7).error == ""
    ((raw,), (asked,)) = ends.p_wire.kinds("answer"), ends.d_wire.kinds("read")
    for sealed, lives, counter, identity, plain in (
        (raw, LIVES, 0, b"slab" + (7).to_bytes(8, "little") + ends.handle, ends.out.message(1, SIZE).tobytes()),
        (asked, LIVES[::-1], 0, b"read" + (7).to_bytes(8, "little"), ends.handle),
    ):
        parts = [b"diptych kv transfer v1", cipher.encode(), *(life.encode() for life in lives)]
        info = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        key = HKDF(SHA256(), 32, sealed[:16], info).derive(SECRET)
        aead = {"aes-gcm": AESGCM, "chacha20-poly1305": ChaCha20Poly1305}[cipher](key)
        assert int.from_bytes(sealed[16:24], "little") == counter
        assert aead.decrypt(bytes(4) + sealed[16:24], sealed[24:], identity) == plain


@given(position=st.integers(0, message_bytes(SIZE) + OVERHEAD_BYTES - 1))
def test_a_bit_changed_anywhere_is_the_error_of_a_damaged_slab(position):
    ends = Ends(lambda size_bytes: replace(NAMED, size_bytes=size_bytes))
    ends.p_wire.flip = position
    done = ends.fetch()
    assert "damaged" in done.error
    assert "tag" in done.error
    assert not ends.into.message(0, SIZE).any()


def test_an_answer_to_another_read_does_not_pass(handle):
    """Recorded and played again: the same slab, asked for once more."""
    ends = Ends(handle)
    assert ends.fetch(1).error == ""
    (recorded,) = ends.p_wire.kinds("answer")
    ends.ask(2)
    ends.p_wire._post(ends.d_wire.address.blob, "answer", 2, recorded)
    assert "damaged" in ends.d.progress()[0].error


def test_a_slab_does_not_pass_for_another_handle(handle):
    ends = Ends(handle)
    (asked,) = ends.ask()
    ends.p._asked[asked.conn, 1] = encode(handle(size_bytes=SIZE, first_token=16))
    ends.p.answer(asked.conn, 1, ends.out.message(1, SIZE))
    assert "damaged" in ends.d.progress()[0].error


def test_who_has_not_the_secret_can_ask_for_nothing(handle):
    ends = Ends(handle, secret=b"x" * 32)
    assert ends.ask() == [RequestArrived(LIVES[1], 1, b"")]  # refused as MALFORMED
    ends.d.notify(ends.key, ends.handle)
    assert ends.p.progress() == [NoteArrived(LIVES[1], b"")]
    ends.p.answer(LIVES[1], 1, ends.out.message(1, SIZE))
    assert "damaged" in ends.d.progress()[0].error


def test_a_refusal_comes_as_it_is(handle):
    ends = Ends(handle)
    (asked,) = ends.ask()
    ends.p.answer(asked.conn, 1, refusal_message(Refusal.STALE))
    assert ends.d.progress() == [ReceiveDone(1)]
    assert read_refusal(memoryview(ends.into.message(0, SIZE)[:HEADER_BYTES])) is Refusal.STALE
    assert ends.fetch(2).error == ""  # the same slab again: nothing of the refusal is left


def test_what_is_kept_of_a_lost_peer_ends_with_it(handle):
    ends = Ends(handle)
    ends.ask()
    ends.d.drop(ends.key, "over")
    ends.p.progress()
    ends.d.progress()
    kept = (ends.p._asked, ends.p._openers, ends.p._sealers, ends.d._sealers, ends.d._openers, ends.d._reads)
    assert kept == ({},) * 6


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_no_nonce_repeats_under_a_key(sizes):
    """With epochs of 50 bytes: a new one begins where the next message would exceed it, and both ends follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "EPOCH_BYTES", 50)
        sealer = Sealer(SECRET, "aes-gcm", *LIVES)
        opener = Opener(SECRET, "aes-gcm", *LIVES)
        seen, of_epoch = set(), {}
        for size in sizes:
            sealed, opened = bytearray(size + OVERHEAD_BYTES), bytearray(size)
            sealer.seal(bytes([size]) * size, b"id", sealed)
            salt, counter = bytes(sealed[:16]), bytes(sealed[16:24])
            assert (salt, counter) not in seen
            seen.add((salt, counter))
            of_epoch[salt] = of_epoch.get(salt, 0) + size
            assert opener.open(sealed, b"id", opened)
            assert bytes(opened) == bytes([size]) * size
        assert max(of_epoch.values()) <= 50
        assert len(opener._epochs) <= 2


def test_no_two_processes_share_a_key_even_of_one_life():
    one, other = (Sealer(SECRET, "aes-gcm", *LIVES) for _ in range(2))
    sealed = [bytearray(1 + OVERHEAD_BYTES) for _ in range(2)]
    one.seal(b"a", b"", sealed[0])
    other.seal(b"a", b"", sealed[1])
    assert sealed[0][:16] != sealed[1][:16]
    assert sealed[0][24:] != sealed[1][24:]
    # Nor do the two directions, another life, or another cipher.
    opened = bytearray(1)
    for cipher, sender, receiver in (
        ("aes-gcm", *LIVES[::-1]), ("aes-gcm", "p0@life2", LIVES[1]), ("aes-gcm", LIVES[0], "d1@life1"),
        ("chacha20-poly1305", *LIVES),
    ):  # fmt: skip
        assert not Opener(SECRET, cipher, sender, receiver).open(sealed[0], b"", opened)
    assert Opener(SECRET, "aes-gcm", *LIVES).open(sealed[0], b"", opened)


@pytest.mark.parametrize("length", [0, 1, OVERHEAD_BYTES - 1, OVERHEAD_BYTES])
def test_too_few_bytes_do_not_open(length):
    assert not Opener(SECRET, "aes-gcm", *LIVES).open(bytes(length), b"", bytearray())


# ---- settings ----


@pytest.mark.parametrize("name", [name for name, spec in transports().items() if spec.device == "cuda"])
def test_transports_within_gpu_memory_refuse_it_by_name(name):
    with pytest.raises(ConfigError, match=f"transport {name} moves slabs between GPUs") as caught:
        TransferConfig(transport=name, device="cuda", kv_encryption="aes-gcm")
    assert caught.value.field == "kv_encryption"
    TransferConfig(transport=name, device="cuda", kv_encryption=OFF)


def test_a_cipher_that_there_is_not_is_named():
    for made in (TransferConfig, WorkerConfig):
        with pytest.raises(ConfigError, match="off, aes-gcm, chacha20-poly1305") as caught:
            made(kv_encryption="rot13")
        assert (caught.value.field, caught.value.value) == ("kv_encryption", "rot13")


def test_it_needs_the_package(monkeypatch):
    monkeypatch.delattr(AESGCM, "decrypt_into")
    with pytest.raises(ConfigError, match="cryptography in version 47"):
        TransferConfig(transport="inproc", kv_encryption="aes-gcm")
    TransferConfig(transport="inproc")


def test_a_pair_with_two_ciphers_does_not_transfer():
    kv = full_format(2, 1, 8, block_size=16, dtype="float32")
    plain = Compat("m", "r", "t", kv, "float32", "a", "s")
    aes, chacha = (replace(plain, kv_encryption=cipher) for cipher in CIPHERS)
    assert "kv_encryption" not in facts(plain)
    assert differences(aes, aes) == []
    assert differences(aes, chacha, converting=True) == ["kv_encryption: mine aes-gcm, theirs chacha20-poly1305"]
    assert differences(plain, aes) == ["kv_encryption: mine unset, theirs aes-gcm"]
