"""Messages between the event loop and the step thread: plain structs, no torch, no sockets.

    event loop --Command--> step thread --list[EngineEvent], one list a step--> event loop

A request's life by mode:

    LOCAL    EngineRequest -> Admitted -> TokensOut* -> Finished
    PREFILL  EngineRequest -> Admitted -> (RangePacked | PromptComputed TokensOut[first token])* -> PrefillComplete
             slabs are granted in advance by GrantSlabs; without a free slab computed blocks wait with the request
    cached   PublishCached -> Admitted -> RangePacked* -> PrefillComplete, of blocks of the prefix cache
    pull     PullBlocks -> PullStarted -> UnpackRange/RangeUnpacked* -> EndPull -> Pulled, into the prefix cache
    REMOTE   EngineRequest -> Admitted (block count reserved, own prefix pinned)
             -> UnpackRange/RangeUnpacked* and FirstToken (any order) -> KvComplete -> TokensOut* -> Finished
             RunLocally at any time before KvComplete: drop what has arrived, compute the prompt here

Cancel is safe in every state; it ends with Failed(RequestCancelledError), and no event of the attempt follows. Every
request ends with exactly one of Finished, PrefillComplete, Pulled, Failed. With several choices (n > 1) and with beam search
each choice ends with ChoiceFinished first. Beam search has FirstCandidates wherever others have first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

from diptych.common.errors import DiptychError
from diptych.common.request import CacheClaim, Prompt
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.common.sampling import TokenLogprobs as TokenLogprobs
from diptych.engine.disk_messages import BlocksRead as BlocksRead
from diptych.engine.disk_messages import BlocksWritten as BlocksWritten
from diptych.engine.grammar.program import Program
from diptych.engine.overlap import Overlap
from diptych.engine.stats import BlockCounts as BlockCounts
from diptych.engine.stats import CacheDump as CacheDump
from diptych.engine.stats import EngineAudit as EngineAudit
from diptych.engine.stats import EngineStats as EngineStats
from diptych.engine.step_messages import BlockCopy as BlockCopy
from diptych.engine.step_messages import Candidate as Candidate
from diptych.engine.step_messages import ComputedFrom as ComputedFrom
from diptych.engine.step_messages import CopyKind as CopyKind
from diptych.engine.step_messages import Install as Install
from diptych.engine.step_messages import LoadedAdapter as LoadedAdapter
from diptych.engine.step_messages import ScheduledSeq as ScheduledSeq
from diptych.engine.step_messages import StepResult as StepResult


class KvMode(Enum):
    LOCAL = "local"
    PREFILL = "prefill"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt, and the command that begins it.

    Args:
        attempt: unique; the key of everything that the engine holds for it.
        output_token_ids: tokens that were sent to the client already: forced, never sampled again. The next sampled
            token has index len(output_token_ids).
        decode_cached_tokens: PREFILL only: leading tokens that decode holds; not packed. A multiple of the block size.
        want_kv: PREFILL only: False packs nothing.
        peer: PREFILL only: decode worker id; slabs have a quota per peer.
        priority: lower goes first; counts under the priority policy only.
        tenant: whose share of tokens and of the prefix cache it uses. Workers take the prompt's salt for it: one for
            each tenant, without a name that could be read.
        choice: number of the first choice; enters the draws.
        layer_groups: PREFILL only: the peer takes the last range in groups of layers too.
        link_bytes_per_s: PREFILL only: what the peer measured of the link between us; 0.0: nothing yet.
        reusable: PREFILL only: of window groups pack also what makes a hit of these tokens, see kv_groups.expected_ranges.
        ranks: PREFILL only: of which ranks KV is packed; empty: of all.
        claim: on the blocks of its tokens, from the time when it frees them; None: they are cached as any others.
        grammar: what sampling.grammar was compiled to, or a mask for the first token; None: any token may come.
        own_tokens: REMOTE only: tokens that this worker will compute itself at most. Where blocks in files would leave more, they
            are not read: KV that a prefill worker sends does not delay the first token, reading files would.
    """

    attempt: str
    prompt: Prompt
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    mode: KvMode = KvMode.LOCAL
    decode_cached_tokens: int = 0
    want_kv: bool = True
    peer: str = ""
    priority: int = 0
    tenant: str = ""
    choice: int = 0
    grammar: Program | None = None
    layer_groups: bool = False
    link_bytes_per_s: float = 0.0
    reusable: bool = False
    ranks: tuple[int, ...] = ()
    own_tokens: int = 0
    claim: CacheClaim | None = None


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Flat bytes in GPU memory, by address: of this process, or of a peer, mapped by CUDA IPC. The creator keeps the
    memory mapped until the range is returned.

    Args:
        checksum: kernels.kv_sum of the bytes; None: they are not packed yet, or need no check.
    """

    address: int
    nbytes: int
    checksum: int | None = None

    def __len__(self) -> int:
        return self.nbytes


Payload = memoryview | DeviceRange


class AttemptEvent:
    """Base of the events of one attempt; the other events concern the whole engine."""

    __slots__ = ()
    attempt: str


# ---- commands: event loop -> step thread -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    attempt: str


@dataclass(frozen=True, slots=True)
class PublishCached:
    """Pack the KV of cached blocks for a peer. They are pinned until it is packed, and nothing is computed.

    Args:
        keys: of consecutive blocks, from the sequence's first one on. The leading ones that are cached are packed; Admitted
            tells how many tokens these are. Without any the attempt is complete at once.
        cached_tokens: leading tokens that the peer has; not packed. A multiple of the block size.
        peer: worker id; slabs have a quota per peer.
        ranks: see EngineRequest.
    """

    attempt: str
    keys: tuple[bytes, ...]
    cached_tokens: int
    peer: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullBlocks:
    """Take the KV of a prompt's leading blocks from another worker's prefix cache into this one's. Blocks that are missing are
    reserved now or not at all: PullStarted follows, or Pulled where none is missing or there is no room.

    Args:
        prompt: its tokens end where the pull ends, at the border of a block.
        tenant: whose share of the prefix cache it uses.
        vouch: what comes is recorded as computed from these tokens (see engine.provenance).
    """

    attempt: str
    prompt: Prompt
    tenant: str = ""
    vouch: bool = False


@dataclass(frozen=True, slots=True)
class EndPull:
    """The leading blocks that have arrived enter the prefix cache, the others are free. Pulled follows."""

    attempt: str


@dataclass(frozen=True, slots=True)
class SlabGrant:
    """A free slab of the staging ring for the step thread to pack into. `payload` is writable."""

    slab: int
    generation: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class GrantSlabs:
    """`overlap`: which ranges are sent before their prompt is computed; None: as before, at first all."""

    grants: tuple[SlabGrant, ...]
    overlap: Overlap | None = None


@dataclass(frozen=True, slots=True)
class UnpackRange:
    """Copy verified KV of tokens [first_token, first_token + num_tokens) into the attempt's blocks; `first_token` is a
    multiple of the block size. RangeUnpacked(job) follows, with unpacked=False if the attempt has ended; until then
    `payload` must not change. A DeviceRange is verified as it is copied.

    Args:
        num_layers: 0: all; otherwise the range holds layers [first_layer, first_layer + num_layers) only, and the
            tokens are there once all their layers are.
        last: once this range and all before it are there, the KV is complete, as with KvComplete.
        group, part: the KV group, counted among those of its rank, and the rank, where there are several. Layers are counted
            within the group.
        converted: its values are not those that this worker would have computed; nothing of the attempt is cached.
        pull: the attempt is a pull (PullBlocks).
    """

    attempt: str
    job: int
    first_token: int
    num_tokens: int
    payload: Payload
    last: bool = False
    first_layer: int = 0
    num_layers: int = 0
    converted: bool = False
    group: int = 0
    part: int = 0
    pull: bool = False


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled for a REMOTE request (one for each choice); streamed at once."""

    attempt: str
    token_id: int
    choice: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FirstCandidates(AttemptEvent):
    """Beam search: what may follow the prompt, the likeliest first. An event of a PREFILL request, in place of its
    first tokens, and a command to the REMOTE one."""

    attempt: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class AllGiven:
    """Every range of a REMOTE request was handed over by UnpackRange, and prefill has vouched for them: those that are still
    being copied count as `last`. KvComplete follows, too."""

    attempt: str


@dataclass(frozen=True, slots=True)
class KvComplete:
    """Every range of a REMOTE request was unpacked: it may join the running batch (once its first token is known, if
    none was forced)."""

    attempt: str


@dataclass(frozen=True, slots=True)
class RunLocally:
    attempt: str


@dataclass(frozen=True, slots=True)
class FetchAgain:
    """A preempted request waits for its KV from a prefill worker, as a REMOTE one whose outputs so far are forced:
    Admitted follows, then UnpackRange/RangeUnpacked* and KvComplete, or RunLocally. Ignored when it runs again already,
    and for several choices or beams."""

    attempt: str


@dataclass(frozen=True, slots=True)
class KeepAdapter:
    """From now on requests may name this adapter (Prompt.adapter is its id). It gets a slot of the runner when a request needs
    it. Once more for an adapter that is known: nothing changes."""

    adapter: LoadedAdapter


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """No new request may name this adapter. It is forgotten, and its slot is free, when those that name it have ended.
    Ignored for an unknown one."""

    adapter_id: str


Command = (
    EngineRequest
    | PublishCached
    | PullBlocks
    | EndPull
    | Cancel
    | GrantSlabs
    | UnpackRange
    | FirstToken
    | FirstCandidates
    | AllGiven
    | KvComplete
    | RunLocally
    | FetchAgain
    | BlocksWritten
    | BlocksRead
    | KeepAdapter
    | DropAdapter
)


PullCommand = PublishCached | PullBlocks | EndPull | UnpackRange


def needs_no_step(command: object) -> TypeGuard[PullCommand]:
    """A command of a pull, at the holder or the reader: it changes nothing that a running step uses, and nothing waits for a step
    because of it. So the step thread handles it between two layers of a step, too."""
    return isinstance(command, PublishCached | PullBlocks | EndPull) or (
        isinstance(command, UnpackRange) and command.pull
    )


# ---- events: step thread -> event loop ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted(AttemptEvent):
    """Blocks are reserved. `num_cached_tokens`: leading tokens of the prompt and the forced outputs found in this worker's own
    prefix cache (whole blocks, pinned for the attempt). `tiers`: how many of them came from each lower tier for this request.
    `num_kept_tokens`: how many of them a claim has kept there."""

    attempt: str
    num_cached_tokens: int
    tiers: tuple[tuple[str, int], ...] = ()
    num_kept_tokens: int = 0


@dataclass(slots=True)
class TokensOut(AttemptEvent):
    """Output tokens with indices offset, offset + 1, ... One step may yield several of a choice.

    Never changed after construction; not frozen, because there is one for every sequence and step, and constructing a
    frozen one takes four times as long.

    Args:
        text: what became certain with these tokens.
        logprobs: one for each token, if they were requested.
    """

    attempt: str
    offset: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs(AttemptEvent):
    """Of prompt tokens first_token, first_token + 1, ...; the prompt's first token has none. In order, chunk by chunk,
    each once. Those of a REMOTE request come from its prefill worker."""

    attempt: str
    first_token: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RangePacked(AttemptEvent):
    """KV of tokens [first_token, first_token + num_tokens) lies in the payload of `slab`. One range fills one slab. Of layers
    [first_layer, first_layer + num_layers) of KV group `group`; num_layers 0: of all. Of rank `part`, where there are several;
    groups are counted among those of the rank, and layers within the group."""

    attempt: str
    slab: int
    generation: int
    first_token: int
    num_tokens: int
    size_bytes: int
    checksum: int
    first_layer: int = 0
    num_layers: int = 0
    group: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class PromptComputed(AttemptEvent):
    """PREFILL: nothing is left to compute; before the first tokens, which are drawn from the same rows.
    `computed_from`: what the runner computed. `compute_s`: seconds of the steps that computed its chunks."""

    attempt: str
    computed_from: ComputedFrom
    compute_s: float


@dataclass(frozen=True, slots=True)
class PrefillComplete(AttemptEvent):
    """All ranges are packed; the attempt's blocks are free or in the prefix cache."""

    attempt: str


@dataclass(frozen=True, slots=True)
class PullStarted(AttemptEvent):
    """Blocks are reserved. `num_cached_tokens`: leading tokens that are cached here. `keys`: of all the blocks of its tokens."""

    attempt: str
    num_cached_tokens: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pulled(AttemptEvent):
    """The end of a pull. Its leading `num_tokens` tokens are in the prefix cache, `num_new` of them by this pull. `note`: why
    nothing was reserved; empty: it was."""

    attempt: str
    num_tokens: int
    num_new: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Preempted(AttemptEvent):
    """A decoding request lost its blocks and waits for new ones; FetchAgain may follow.

    Args:
        num_tokens: tokens whose KV it needs again.
        resume_s: time to restore it here, from the host tier or by computing, by measured rates.
    """

    attempt: str
    num_tokens: int
    resume_s: float


@dataclass(frozen=True, slots=True)
class RangeUnpacked(AttemptEvent):
    """`error`: what was wrong with the bytes; empty with unpacked=False: the attempt no longer waits for them."""

    attempt: str
    job: int
    unpacked: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceFinished(AttemptEvent):
    """One of several choices has ended."""

    attempt: str
    choice: int
    reason: FinishReason
    num_output_tokens: int
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Finished(AttemptEvent):
    """The end of the attempt. With several choices: the reason of the last one that ended, the output tokens of all."""

    attempt: str
    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed(AttemptEvent):
    attempt: str
    error: DiptychError


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that entered the prefix cache. `sequence` rises by one with every cache event of an epoch."""

    sequence: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    sequence: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The prefix cache was emptied and a new epoch begins; sequence restarts at 0 after this event."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TierStored:
    """Blocks that entered a tier below the prefix cache. `sequence` counts the events of the tier, from 1 on in each
    epoch."""

    tier: str
    sequence: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierEvicted:
    tier: str
    sequence: int
    keys: tuple[bytes, ...]


CacheEvent = BlocksStored | BlocksEvicted | CacheCleared
EngineEvent = (
    Admitted
    | TokensOut
    | FirstCandidates
    | PromptComputed
    | PromptLogprobs
    | RangePacked
    | PrefillComplete
    | PullStarted
    | Pulled
    | Preempted
    | RangeUnpacked
    | ChoiceFinished
    | Finished
    | Failed
    | BlocksStored
    | BlocksEvicted
    | CacheCleared
    | TierStored
    | TierEvicted
)
