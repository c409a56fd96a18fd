"""Slabs and control messages encrypted on their way, around any transport whose slabs lie in host memory.

    key = HKDF-SHA256(cluster secret; salt; cipher, sender's life, receiver's life)

    read    -> salt | counter | seal(handle)  with read_id as associated data      RequestArrived
    answer  -> salt | counter | seal(slab)    with read_id and the handle           ReceiveDone
    notify  -> salt | counter | seal(handle)                                        NoteArrived

A nonce is the counter under a key. The sender draws the salt (16 random bytes) for each peer and epoch, so no two processes,
lives, peers or epochs share a key, and no nonce repeats under one. A slab passes only as the answer to the read and the
handle that it was asked with. Refusals stay open: whoever could forge one could cut the connection as well.

Ciphertext has slabs of its own, one beside each slab of the ring: the ledgers' rules on when a slab may be written hold for
it, too.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import struct
from typing import Any

import numpy as np

from diptych.common.errors import ConfigError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric import registry
from diptych.kvtransfer.fabric.transport import (
    NoteArrived,
    PeerLost,
    ReceiveDone,
    RequestArrived,
    Transport,
    TransportEvent,
    Wakeup,
    peer_key,
)
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring, RingSpec, read_refusal
from diptych.kvtransfer.wrappers.ciphers import MODES, OFF

log = logging.getLogger(__name__)
PURPOSE = "kv encryption"
"""Of the key derived from the cluster secret, see common.secret.derive_key."""
_SALT_BYTES, _TAG_BYTES, _KEY_BYTES = 16, 16, 32
_COUNTER = struct.Struct("<Q")
_FRONT_BYTES = _SALT_BYTES + _COUNTER.size
OVERHEAD_BYTES = _FRONT_BYTES + _TAG_BYTES
EPOCH_BYTES = 1 << 36
"""Sent under one key, 2^32 blocks of AES: an attacker's advantage stays near 2^-65."""
_KEPT_EPOCHS = 2
"""Of a sender, at its receiver: a slab may arrive behind the first message of the next epoch."""


class Sealer:
    """Key, salt and counter of what one process sends to one peer. Raises: ConfigError for an unknown cipher.

    Args: secret: derived from the cluster secret; sender, receiver: one life each, see `peer_key`.
    """

    def __init__(self, secret: bytes, cipher: str, sender: str, receiver: str) -> None:
        self._derive = (secret, cipher, sender, receiver)
        self._next_epoch()

    def _next_epoch(self) -> None:
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._cipher = _cipher(*self._derive, self._salt)
        self._counter = 0
        self._left = EPOCH_BYTES

    def seal(self, message: Any, identity: bytes, into: Any) -> None:
        """Encrypt `message` into `into`, which has OVERHEAD_BYTES more. `identity`: associated data."""
        size = memoryview(message).nbytes
        if self._left < size:
            self._next_epoch()
        view = memoryview(into)
        view[:_SALT_BYTES] = self._salt
        _COUNTER.pack_into(view, _SALT_BYTES, self._counter)
        nonce = _nonce(self._counter)
        self._counter += 1
        self._left -= size
        self._cipher.encrypt_into(nonce, message, identity, view[_FRONT_BYTES:])


class Opener:
    """What one process receives from one peer. Args: as of Sealer."""

    def __init__(self, secret: bytes, cipher: str, sender: str, receiver: str) -> None:
        self._derive = (secret, cipher, sender, receiver)
        self._epochs: dict[bytes, Any] = {}

    def open(self, sealed: Any, identity: bytes, into: Any) -> bool:
        """Decrypt into `into`, which has OVERHEAD_BYTES less. False: it is not what the peer sealed with this identity."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed)
        if view.nbytes < OVERHEAD_BYTES:
            return False
        salt = bytes(view[:_SALT_BYTES])
        cipher = self._epochs.get(salt) or _cipher(*self._derive, salt)
        try:
            cipher.decrypt_into(_nonce(*_COUNTER.unpack_from(view, _SALT_BYTES)), view[_FRONT_BYTES:], identity, into)
        except InvalidTag:
            return False
        self._epochs[salt] = cipher  # only now: a forger's salts are not kept
        if len(self._epochs) > _KEPT_EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        return True


def _nonce(counter: int) -> bytes:
    return bytes(4) + _COUNTER.pack(counter)


def _cipher(secret: bytes, cipher: str, sender: str, receiver: str, salt: bytes) -> Any:
    # Imported here: without encryption nothing needs it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    parts = (b"diptych kv transfer v1", cipher.encode(), sender.encode(), receiver.encode())
    info = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    key = HKDF(SHA256(), _KEY_BYTES, salt, info).derive(secret)
    return {"aes-gcm": AESGCM, "chacha20-poly1305": ChaCha20Poly1305}[cipher](key)


def check_mode(mode: str, transport: str) -> None:
    """Raises: ConfigError when it is unknown, when nothing can encrypt on this transport, or when the package `cryptography`
    is too old or missing."""
    if mode not in MODES:
        raise ConfigError("kv_encryption", mode, f"must be one of {', '.join(MODES)}")
    if mode == OFF:
        return
    spec = registry.transports().get(transport)
    if spec is not None and spec.why_not_encrypted:
        raise ConfigError("kv_encryption", mode, spec.why_not_encrypted)
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError("kv_encryption", mode, f"needs the package cryptography: {error}") from None
    if not hasattr(AESGCM, "decrypt_into"):
        raise ConfigError("kv_encryption", mode, "needs the package cryptography in version 47 or later")


class EncryptedTransport:
    """Wraps `inner`. Args: secret: PURPOSE's key of the cluster; me: `peer_key` of this process."""

    def __init__(self, inner: Transport, cipher: str, *, secret: bytes, me: str) -> None:
        self.inner = inner
        self.path = inner.path
        self._cipher, self._secret, self._me = cipher, secret, me
        self._sealers: dict[str, Sealer] = {}
        self._openers: dict[str, Opener] = {}
        """By connection or peer."""
        self._asked: dict[tuple[str, int], bytes] = {}
        """(connection, read) -> the handle of a request that was not answered yet."""
        self._reads: dict[int, tuple[str, bytes, np.ndarray, np.ndarray]] = {}
        """Read -> peer, handle, where the slab goes, where its ciphertext comes."""
        self._ring: Ring
        self._sealed: Ring

    @property
    def address(self) -> KvAddress:
        return self.inner.address

    def register(self, ring: Ring) -> None:
        self._ring = ring
        self._sealed = Ring(RingSpec(ring.spec.num_slabs, ring.spec.slab_bytes + mmap.PAGESIZE))
        self.inner.register(self._sealed)

    def connect(self, peer: PeerRef) -> str:
        return self.inner.connect(peer)

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        sealed = self._beside(dest)
        sealed[:HEADER_BYTES] = 0  # a refusal of this slab's last life
        self._reads[read_id] = (peer, body, dest, sealed)
        try:
            self.inner.read(peer, read_id, self._seal(peer, body, _id(b"read", read_id)), sealed)
        except BaseException:
            del self._reads[read_id]
            raise

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        body = self._asked.pop((conn, read_id), b"")
        if isinstance(message, bytes):
            return self.inner.answer(conn, read_id, message)
        sealed = self._beside(message)
        self._sealer(conn).seal(message, _id(b"slab", read_id) + body, sealed)
        return self.inner.answer(conn, read_id, sealed)

    def path_to(self, peer: str) -> str:
        return self.inner.path_to(peer)

    def notify(self, peer: str, body: bytes) -> None:
        self.inner.notify(peer, self._seal(peer, body, b"note"))

    def progress(self) -> list[TransportEvent]:
        events = [self._opened(event) for event in self.inner.progress()]
        self.path = self.inner.path  # one that chooses by the peer knows it only now
        return events

    def busy(self) -> bool:
        return self.inner.busy()

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        self.inner.wait(wakeup, timeout_s, awaited=awaited)

    def drop(self, peer: str, why: str) -> None:
        self.inner.drop(peer, why)

    def close(self) -> None:
        self.inner.close()

    # ---- inside ----

    def _opened(self, event: TransportEvent) -> TransportEvent:
        """What does not open becomes an empty message, which is answered or dropped as any that does not parse."""
        match event:
            case RequestArrived(conn, read_id, body):
                opened = self._open(conn, body, _id(b"read", read_id))
                if opened:
                    self._asked[conn, read_id] = opened
                return RequestArrived(conn, read_id, opened)
            case NoteArrived(conn, body):
                return NoteArrived(conn, self._open(conn, body, b"note"))
            case ReceiveDone(read_id, error):
                return ReceiveDone(read_id, self._received(read_id, error))
            case PeerLost(peer, _):
                self._sealers.pop(peer, None)  # the next one draws a salt of its own
                self._openers.pop(peer, None)
                self._asked = {asked: body for asked, body in self._asked.items() if asked[0] != peer}
        return event

    def _received(self, read_id: int, error: str) -> str:
        """What is wrong with an answer; empty: the slab is decrypted, or it is a refusal."""
        read = self._reads.pop(read_id, None)
        if error or read is None:
            return error
        peer, body, dest, sealed = read
        if read_refusal(sealed[:HEADER_BYTES].data) is not None:
            dest[:HEADER_BYTES] = sealed[:HEADER_BYTES]
            return ""
        if self._opener(peer).open(sealed, _id(b"slab", read_id) + body, dest):
            return ""
        dest[:] = 0  # what was decrypted before the tag was found wrong
        return f"slab of {peer} is damaged: its {self._cipher} tag does not fit"

    def _beside(self, message: np.ndarray) -> np.ndarray:
        """Where the ciphertext of a slab's message lies."""
        slab, rest = divmod(message.ctypes.data - self._ring.array.ctypes.data, self._ring.spec.slab_bytes)
        assert rest == 0, "a message begins with its slab"
        start = slab * self._sealed.spec.slab_bytes
        return self._sealed.array[start : start + message.nbytes + OVERHEAD_BYTES]

    def _seal(self, peer: str, body: bytes, identity: bytes) -> bytes:
        sealed = bytearray(len(body) + OVERHEAD_BYTES)
        self._sealer(peer).seal(body, identity, sealed)
        return bytes(sealed)

    def _open(self, conn: str, body: bytes, identity: bytes) -> bytes:
        opened = bytearray(max(0, len(body) - OVERHEAD_BYTES))
        return bytes(opened) if self._opener(conn).open(body, identity, opened) else b""

    def _sealer(self, peer: str) -> Sealer:
        if peer not in self._sealers:
            self._sealers[peer] = Sealer(self._secret, self._cipher, self._me, _life(peer))
        return self._sealers[peer]

    def _opener(self, peer: str) -> Opener:
        if peer not in self._openers:
            self._openers[peer] = Opener(self._secret, self._cipher, _life(peer), self._me)
        return self._openers[peer]


def encrypted(transport: Transport, mode: str, *, secret: bytes, worker_id: str, incarnation: str) -> Transport:
    """`transport`, or one that encrypts around it."""
    if mode == OFF:
        return transport
    return EncryptedTransport(transport, mode, secret=secret, me=peer_key(worker_id, incarnation))


def _id(kind: bytes, read_id: int) -> bytes:
    return kind + _COUNTER.pack(read_id)


def _life(peer: str) -> str:
    """A peer's key, or that of a connection, which a transport may number behind "#"."""
    return peer.partition("#")[0]
