"""Ids by which a caller goes on with an answer whose stream broke, at this router or another one. Pure.

    <ref>.<seen>   ref: the answer, base64 of its claims and their MAC, the same for every event of a stream
                   seen: what the caller has, whole numbers with "-" between: see Seen

A router that gets one needs nothing from the one that issued it: the body of the request comes again with it, and the ref
has the rest. The MAC is over the caller's tenant, too, so that another tenant's key makes of it what it makes of an id that
does not exist. The claims are no secret.

A caller without a ref, since its answer would have come whole, has its idempotency key. Decode keeps the ref under a hash of key
and tenant (`Refs.key_of`), and a router that is asked with the key looks there.
"""

from __future__ import annotations

import hmac
import re
import struct
from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from zlib import crc32

from blake3 import blake3

from diptych.common.errors import InvalidRequestError
from diptych.common.request import Prompt
from diptych.common.sampling import MAX_CHOICES, SamplingParams
from diptych.rpc.convert import sampling_to_proto

PURPOSE = "resuming of answers"
"""Purpose of the derived key, see common.secret.derive_key."""
_CLAIMS = struct.Struct(">12s12s4sQIQ8s")
"""Request id, attempt id, worker, seed, max_tokens, creation time, digest of the request."""
_MAC_BYTES, _KEY_BYTES = 12, 16
_KEY_DOMAIN = b"idempotency key\0"
MAX_ID_CHARS = 4096
_NUMBERS = re.compile(r"\d{1,12}(?:-\d{1,12})*", re.ASCII)
_HEX = re.compile(r"(req|att)-([0-9a-f]{24})", re.ASCII)

TOKENS, CHOICE_END, PROMPT, END, BEGIN = range(1, 6)
"""Kinds of events that make several messages of a stream."""


@dataclass(frozen=True, slots=True)
class SeenChoice:
    """What a caller has of one choice: its first tokens, the characters of text that came with them, a checksum of their
    ids (`checksum`), how many of them were counted as reasoning, and whether it has the choice's end."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    num_reasoning: int = 0
    ended: bool = False

    def text(self) -> str:
        """As in an id."""
        return f"{self.num_tokens}-{self.num_chars}-{self.checksum}-{self.num_reasoning}-{int(self.ended)}"


@dataclass(frozen=True, slots=True)
class Step:
    """A part of what one event made: its first `parts` messages.

    Args:
        kind: of the event.
        choice: of it.
        num_tokens, num_chars: of the choice after the event, for TOKENS.
    """

    kind: int
    choice: int
    num_tokens: int
    num_chars: int
    parts: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a caller has of an answer. `prompt`: the prompt's log probabilities. `sequence`: number of the next message,
    where messages are numbered, without those of `step`."""

    choices: tuple[SeenChoice, ...]
    prompt: bool = False
    sequence: int = 0
    step: Step | None = None

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def text(self) -> str:
        choices = "-".join(choice.text() for choice in self.choices)
        text = f"{len(self.choices)}-{int(self.prompt)}-{self.sequence}-{choices}"
        step = self.step
        if step is None:
            return text
        return f"{text}-{step.kind}-{step.choice}-{step.num_tokens}-{step.num_chars}-{step.parts}"


def parse_seen(text: str) -> Seen | None:
    """None: it is none."""
    if _NUMBERS.fullmatch(text) is None:
        return None
    numbers = list(map(int, text.split("-")))
    if len(numbers) < 3 or not 1 <= numbers[0] <= MAX_CHOICES or numbers[1] > 1:
        return None
    end = 3 + 5 * numbers[0]
    if len(numbers) not in (end, end + 5) or any(numbers[i + 4] > 1 for i in range(3, end, 5)):
        return None
    choices = tuple(
        SeenChoice(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3], bool(numbers[i + 4]))
        for i in range(3, end, 5)
    )
    step = Step(*numbers[end:]) if len(numbers) > end else None
    if step is not None and not (TOKENS <= step.kind <= BEGIN and step.choice < len(choices) and step.parts):
        return None
    return Seen(choices, bool(numbers[1]), numbers[2], step)


def checksum(token_ids: tuple[int, ...] | list[int], before: int = 0) -> int:
    """Of tokens that follow those of the checksum `before`."""
    if len(token_ids) == 1:
        return crc32(token_ids[0].to_bytes(4, "little"), before)
    return crc32(array("I", token_ids).tobytes(), before)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a request goes on.

    Args:
        ref: of the id.
        attempt, worker: where the answer was computed last, see `worker_mark`.
        created: Unix seconds of the first request.
        digest: see `digest_of`.
    """

    ref: str
    request_id: str
    attempt: str
    worker: bytes
    seed: int
    max_tokens: int
    created: int
    digest: bytes
    seen: Seen


def worker_mark(worker_id: str, incarnation: str) -> bytes:
    """Tells a cluster's workers apart, in few bytes."""
    return blake3(f"{worker_id}\0{incarnation}".encode()).digest(4)


def digest_of(prompt: Prompt, sampling: SamplingParams) -> bytes:
    """Of everything that an answer depends on."""
    ids = array("I", prompt.token_ids).tobytes()
    params = sampling_to_proto(sampling).SerializeToString(deterministic=True)
    header = struct.pack(">II", len(ids), len(params)) + prompt.cache_salt
    return blake3(header + ids + params + prompt.adapter.encode()).digest(8)


class Refs:
    """Issues and reads the refs of a cluster. `key`: 32 bytes, see PURPOSE."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _mac(self, claims: bytes, owner: bytes) -> bytes:
        return blake3(claims + owner, key=self._key).digest(_MAC_BYTES)

    def issue(
        self,
        request_id: str,
        attempt: str,
        worker: bytes,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        created: int,
        owner: bytes,
    ) -> str:
        """`owner`: the tenant's salt. Returns: "" for ids that are not of common.ids."""
        names = [_HEX.fullmatch(name) for name in (request_id, attempt)]
        if None in names:
            return ""
        first, second = (bytes.fromhex(name[2]) for name in names if name is not None)
        digest = digest_of(prompt, sampling)
        claims = _CLAIMS.pack(first, second, worker, sampling.seed % 2**64, sampling.max_tokens, created, digest)
        return urlsafe_b64encode(claims + self._mac(claims, owner)).decode().rstrip("=")

    def key_of(self, idempotency_key: str, owner: bytes) -> bytes:
        """What decode finds an answer by. It tells nobody the key."""
        return blake3(_KEY_DOMAIN + owner + idempotency_key.encode(), key=self._key).digest(_KEY_BYTES)

    def read(self, value: object, owner: bytes, param: str) -> ResumePoint:
        """Raises: InvalidRequestError, with the same text whether it was never issued or to another tenant."""
        error = InvalidRequestError(f"{param}: there is no answer of yours with this id that could go on", param=param)
        if not isinstance(value, str) or len(value) > MAX_ID_CHARS:
            raise error
        ref, _, rest = value.partition(".")
        seen = parse_seen(rest)
        point = self.begun(ref, owner, seen or Seen(()))
        if point is None or seen is None:
            raise error
        return point

    def begun(self, ref: str, owner: bytes, seen: Seen) -> ResumePoint | None:
        """The answer of this ref; None: it was never issued, or to another tenant."""
        try:
            sealed = urlsafe_b64decode(ref.encode("ascii") + b"=" * (-len(ref) % 4))
        except ValueError:
            return None
        claims, mac = sealed[: _CLAIMS.size], sealed[_CLAIMS.size :]
        if not hmac.compare_digest(mac, self._mac(claims, owner)) or len(claims) != _CLAIMS.size:
            return None
        first, second, worker, seed, max_tokens, created, digest = _CLAIMS.unpack(claims)
        return ResumePoint(
            ref, f"req-{first.hex()}", f"att-{second.hex()}", worker, seed, max_tokens, created, digest, seen
        )
