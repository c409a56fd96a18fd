"""One request inside the scheduler.

    WAITING --admit--> RUNNING ------------------------------------------------> FINISHED_STOPPED / _LENGTH
       |                |  ^  ^                                                    ^
       |                |  |  +--preempt/admit--> PREEMPTED --FetchAgain--> (WAITING, REMOTE)
       |                |  |                                                       |
       |                |  +--KvComplete + FirstToken, or RunLocally--+            |
       +--admit REMOTE--|---------> WAITING_FOR_REMOTE_KV ------------+------------+ (first token ends it)
                        |                  +--RunLocally, window groups--> PREEMPTED
                        |                  +--EndPull, of a pull---------> FINISHED_HANDED_OFF
                        +--PREFILL computed--> PACKING --all packed--> FINISHED_HANDED_OFF

Every state that is not final may also go to FINISHED_CANCELLED or FINISHED_FAILED. A forked choice or beam begins
RUNNING."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from diptych.common.block_identity import BlockHasher, IdentityHeader
from diptych.engine.messages import EngineRequest, KvMode, ScheduledSeq
from diptych.engine.sched.requests.output import OutputProcessor


class State(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PACKING = "packing"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_HANDED_OFF = "finished_handed_off"
    FINISHED_CANCELLED = "finished_cancelled"
    FINISHED_FAILED = "finished_failed"


_ENDED_BADLY = frozenset({State.FINISHED_CANCELLED, State.FINISHED_FAILED})
_ENDED_WELL = frozenset({State.FINISHED_STOPPED, State.FINISHED_LENGTH})

LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.WAITING_FOR_REMOTE_KV}) | _ENDED_WELL | _ENDED_BADLY,
    State.WAITING_FOR_REMOTE_KV: frozenset({State.RUNNING, State.PREEMPTED, State.FINISHED_HANDED_OFF})
    | _ENDED_WELL
    | _ENDED_BADLY,
    State.RUNNING: frozenset({State.PREEMPTED, State.PACKING, State.FINISHED_HANDED_OFF}) | _ENDED_WELL | _ENDED_BADLY,
    State.PREEMPTED: frozenset({State.RUNNING, State.WAITING}) | _ENDED_BADLY,
    State.PACKING: frozenset({State.FINISHED_HANDED_OFF}) | _ENDED_BADLY,
    State.FINISHED_STOPPED: frozenset(),
    State.FINISHED_LENGTH: frozenset(),
    State.FINISHED_HANDED_OFF: frozenset(),
    State.FINISHED_CANCELLED: frozenset(),
    State.FINISHED_FAILED: frozenset(),
}


class IllegalMoveError(AssertionError):
    """Our own bug: names the move and the states that led to it."""


class _EveryStep:
    """The fields that every decode step reads. Slots of a base class lie in front of those of its subclasses, so these
    lie
    side by side: with thousands of sequences a step's time is that of fetching their memory."""

    __slots__ = (
        "attempt", "attempt_id", "block_end", "block_ids", "choice", "ended", "num_computed", "num_prompt", "output", "seq",
        "token_ids",
    )  # fmt: skip


class Request(_EveryStep):
    """What the scheduler knows of one sequence. State that only one kind of request has lies with its owner:
    RemoteRequests, ChoiceGroups, BeamGroups, Packing.

    The token ranges, all counted from the prompt's first token:

        |<- num_computed: KV is there ->|<- to compute ->|
        |<- token_ids: prompt, forced outputs, sampled outputs ->|
        |<- kv_target: what crosses between prefill and decode ->|     PREFILL and REMOTE only

    A PREFILL request's tokens end at kv_target: the prompt and all forced outputs but the last.
    """

    __slots__ = (
        "adapter", "arrival", "arrived_at", "compute_s", "converted", "device_row", "forced", "hasher", "header", "history",
        "kv_target", "max_model_len", "max_tokens_total", "mode", "num_cached_tokens", "num_kept_tokens", "num_published",
        "peer", "priority", "prompt_logprobs_from", "reserved", "returned", "samples", "sampling", "shares_tail", "source",
        "state", "steps_on_device", "swapped", "tables", "tenant", "tier_tokens", "tokens_on_device", "want_kv", "was_admitted",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        arrival: int,
        header: IdentityHeader,
        max_model_len: int,
        output: OutputProcessor | None,
        arrived_at: float = 0.0,
        num_groups: int = 1,
    ) -> None:
        prompt, forced = request.prompt.token_ids, request.output_token_ids
        self.source = request
        self.attempt = request.attempt
        """Unique in the scheduler. Differs from `attempt_id` for the choices and beams that were forked."""
        self.attempt_id = request.attempt
        """The attempt's name in commands and events."""
        self.arrival = arrival
        """Rises with every request: the order of FCFS, and the youngest is preempted first."""
        self.adapter = request.prompt.adapter
        """Its id; empty: none."""
        self.arrived_at = arrived_at
        self.priority, self.tenant = request.priority, request.tenant
        self.choice = request.choice
        """Number of the choice or beam."""
        self.was_admitted = False
        """Its KV was computed or fetched once."""
        self.returned = False
        """It was admitted before, or waited for remote KV: it waits before others of its class."""
        self.sampling = request.sampling
        self.mode = request.mode
        self.peer = request.peer
        self.want_kv = request.mode is KvMode.PREFILL and request.want_kv
        self.output = output
        self.state = State.WAITING
        self.ended = False
        """In a final state, and no longer among the scheduler's requests."""
        self.history = [State.WAITING]
        self.num_prompt = len(prompt)
        self.forced = len(forced)
        self.kv_target = len(prompt) + max(0, len(forced) - 1)
        self.samples = not (request.mode is KvMode.PREFILL and forced)
        """False: a PREFILL whose next token the client has already."""
        self.token_ids = [*prompt, *forced]
        if request.mode is KvMode.PREFILL:
            del self.token_ids[self.kv_target :]
            self.max_tokens_total = self.kv_target + 1
        else:
            self.max_tokens_total = min(len(prompt) + request.sampling.max_tokens, max_model_len)
        self.max_model_len = max_model_len
        self.prompt_logprobs_from: int | None = None if request.sampling.prompt_logprobs is None else 1
        """First prompt token whose logprob was not sent yet; None: none are wanted (any more)."""
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.tier_tokens: dict[str, int] = {}
        """By tier below the first: leading tokens whose KV came from there for this request."""
        self.num_kept_tokens = 0
        """Cached tokens that were kept because of claims, see BlockPool.num_kept."""
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        """By KV group, its blocks from seq.first_blocks on. This and the next seven: KvCacheManager's account of the
        request."""
        self.block_ids = self.tables[0]
        self.block_end = 0
        """The block at which the shortest table ends."""
        self.reserved = [0] * num_groups
        """By group, blocks that are counted for it and have no id yet."""
        self.num_published = 0
        """Leading blocks that came from the prefix cache or went through it."""
        self.converted = False
        """It holds KV that was converted from another dtype: none of it may answer for KV that is computed here."""
        self.shares_tail = False
        """The block that the next token is written to may have other owners."""
        self.swapped: list[int] = []
        """PREEMPTED: slots of the host tier that hold its first num_computed tokens' KV."""
        self.steps_on_device = 0
        """Steps with it that are on the device. Its blocks are not freed before they have landed."""
        self.tokens_on_device = 0
        """Of its prompt, in steps that are on the device: they are not in num_computed yet."""
        self.device_row = -1
        """Its place in the step that was launched last, while that is on the device; -1: it is not in it."""
        self.compute_s = 0.0
        self.header = header
        self.hasher = BlockHasher(header)
        self.seq = ScheduledSeq(
            self.attempt,
            [],
            0,
            self.tables,
            False,
            self.sampling,
            0,
            (0,) * num_groups,
            choice=self.choice,
            top_logprobs=self._top_logprobs(),
            history=self.token_ids if self.sampling.constrained or request.grammar is not None else None,
            num_prompt=self.num_prompt,
            grammar=request.grammar,
            vouch=request.mode is KvMode.PREFILL,
        )

    def _top_logprobs(self) -> int | None:
        if self.sampling.beam_width:
            return self.sampling.logprobs
        if self.sampling.logprobs is None and self.sampling.num_choices > self.sampling.n:
            return 0  # best_of ranks by them
        return self.sampling.logprobs

    def fork_choice(self, choice: int, output: OutputProcessor) -> Request:
        """Another choice with the same prompt, RUNNING, without blocks."""
        return self._fork(choice, output)

    def fork_beam(self, number: int) -> Request:
        """Another beam with the same tokens, RUNNING, without blocks."""
        other = self._fork(number, None)
        other.returned = self.returned
        other.token_ids.extend(self.token_ids[self.num_prompt :])  # in place: seq.history is this very list
        other.seq.num_candidates = self.seq.num_candidates
        return other

    def _fork(self, choice: int, output: OutputProcessor | None) -> Request:
        source = replace(self.source, choice=choice, mode=KvMode.LOCAL)
        other = Request(
            source,
            self.arrival,
            self.header,
            self.max_model_len,
            output,
            self.arrived_at,
            len(self.tables),
        )
        other.attempt = f"{self.attempt_id}\0{choice}"
        other.state = State.RUNNING
        other.history = [State.RUNNING]
        other.num_cached_tokens = self.num_cached_tokens
        other.prompt_logprobs_from = None
        other.was_admitted = True
        return other

    @property
    def holds_blocks(self) -> bool:
        """Owned or reserved."""
        return any(self.tables) or any(self.reserved)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that no step has computed, and none on the device computes."""
        return len(self.token_ids) - self.num_computed - self.tokens_on_device

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_kv_tokens(self) -> int:
        """KV it can ever need: the last token of a sequence is never computed."""
        return self.max_tokens_total - 1

    @property
    def may_be_refetched(self) -> bool:
        """A prefill worker could compute what it needs again: prompt and outputs of one choice, and nothing else is
        due."""
        alone = self.sampling.num_choices == 1 and not self.sampling.beam_width
        return alone and self.num_outputs > 0 and self.prompt_logprobs_from is None

    def move(self, to: State) -> None:
        if to not in LEGAL_MOVES[self.state]:
            states = " -> ".join(s.value for s in self.history)
            raise IllegalMoveError(
                f"attempt {self.attempt}: {self.state.value} -> {to.value} is no legal move; so far {states}"
            )
        self.state = to
        self.ended = not LEGAL_MOVES[to]
        if len(self.history) < 64:
            self.history.append(to)

    def keys(self, num_blocks: int) -> list[bytes]:
        """Keys of the first `num_blocks` blocks; their tokens must be known."""
        have = self.hasher.num_tokens
        want = num_blocks * self.header.block_size
        if have < want:
            self.hasher.update(self.token_ids[have:want])
        return self.hasher.keys
