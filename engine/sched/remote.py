"""A REMOTE request while its KV arrives: which ranges may be unpacked where, and when it joins the running batch."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import InternalError
from diptych.engine.messages import FirstCandidates, FirstToken, KvMode, UnpackRange
from diptych.engine.sched import beams, results
from diptych.engine.sched.request import Request, State
from diptych.engine.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class UnpackJob:
    """Copy `num_tokens` tokens' KV from the command's payload into `block_ids`. `layers`: of these only; None: of all."""

    request: Request
    first_block: int
    block_ids: list[int]
    num_tokens: int
    layers: range | None = None


def _waiting(scheduler: Scheduler, attempt: str) -> Request | None:
    request = scheduler.requests.get(attempt)
    return request if request is not None and request.state is State.WAITING_FOR_REMOTE_KV else None


def plan_unpack(scheduler: Scheduler, command: UnpackRange) -> UnpackJob | None:
    """Where the range goes; None when it must not be written: the attempt is gone or runs already, the range is not
    block-aligned, overlaps the pinned prefix, reaches past the end or the layers, or the payload is too short."""
    request = _waiting(scheduler, command.attempt)
    if request is None or request.kv_complete:
        return None
    size = scheduler.config.block_size
    first, end = command.first_token, command.first_token + command.num_tokens
    whole = end % size == 0 or end == request.kv_target
    if command.num_tokens < 1 or first % size or not whole:
        return None
    if first < request.num_computed or end > request.kv_target:
        return None
    all_layers, token_bytes = scheduler.limits.num_layers, scheduler.limits.kv_bytes_per_token
    num_layers = command.num_layers or all_layers
    if command.first_layer < 0 or command.first_layer + num_layers > all_layers:
        return None
    if len(command.payload) < command.num_tokens * token_bytes * num_layers // all_layers:
        return None
    request.converted = request.converted or command.converted
    some = num_layers < all_layers
    layers = range(command.first_layer, command.first_layer + num_layers) if some else None
    scheduler.kv.bind(request)
    first_block = first // size
    return UnpackJob(request, first_block, request.block_ids[first_block : -(-end // size)], command.num_tokens, layers)


def unpacked(scheduler: Scheduler, job: UnpackJob, *, last: bool) -> None:
    """Every byte of the range is there, and was verified. After the last one the request runs in the very next step: a round
    trip to the event loop would cost it a step. What is missing then is the leg's to say, not ours."""
    request = job.request
    blocks = range(job.first_block, job.first_block + len(job.block_ids))
    if job.layers is None:
        request.covered.update(blocks)
    else:
        _layers_came(request, blocks, job.layers, scheduler.limits.num_layers)
    if last and not _missing(scheduler, request):
        kv_complete(scheduler, request.public)


def _layers_came(request: Request, blocks: range, layers: range, num_layers: int) -> None:
    came = (1 << layers.stop) - (1 << layers.start)
    for block in blocks:
        request.layers_in[block] = request.layers_in.get(block, 0) | came
        if request.layers_in[block] == (1 << num_layers) - 1:
            request.covered.add(block)


def _missing(scheduler: Scheduler, request: Request) -> list[int]:
    size = scheduler.config.block_size
    wanted = range(request.num_computed // size, -(-request.kv_target // size))
    return [i for i in wanted if i not in request.covered]


def first_token(scheduler: Scheduler, command: FirstToken) -> None:
    """Streamed at once; it may end the request. Ignored when the attempt is past it: a token that was sent stays. Those of
    several choices wait until all are here and so is the KV that they share."""
    request = _waiting(scheduler, command.attempt)
    if request is None or request.num_outputs > 0:
        return
    if not 0 <= command.token_id < scheduler.limits.vocab_size:
        scheduler.fail(
            request, InternalError(f"prefill sent token {command.token_id}, which is outside the vocabulary")
        )
        return
    group = request.choices
    if request.beams is not None:
        scheduler.fail(request, InternalError("prefill sent a token: beam search waits for candidates"))
        return
    if group is None:
        results.take_token(scheduler, request, command.token_id, command.logprobs)
    elif command.choice not in group.numbers:
        scheduler.fail(request, InternalError(f"prefill sent a token of choice {command.choice}: there is none"))
        return
    elif group.withholds and command.logprobs is None:
        scheduler.fail(request, InternalError("prefill sent a token without logprobs: best_of needs them"))
        return
    else:
        group.first_tokens.setdefault(command.choice, (command.token_id, command.logprobs))
    _join_if_ready(scheduler, request)


def first_candidates(scheduler: Scheduler, command: FirstCandidates) -> None:
    """Beam search: they wait until the KV is here. Ignored when the attempt is past them, or has some already."""
    request = _waiting(scheduler, command.attempt)
    if request is None:
        return
    if request.beams is None:
        scheduler.fail(request, InternalError("prefill sent candidates of a beam search: there is none"))
        return
    if any(not 0 <= one.token_id < scheduler.limits.vocab_size for one in command.candidates):
        scheduler.fail(request, InternalError("prefill sent a candidate outside the vocabulary"))
        return
    if request.beams.first_candidates is None:
        request.beams.first_candidates = command.candidates
    _join_if_ready(scheduler, request)


def kv_complete(scheduler: Scheduler, attempt: str) -> None:
    """Join the running batch, or wait for the first token. A gap in the KV fails the request: it must never be attended."""
    request = _waiting(scheduler, attempt)
    if request is None:
        return
    missing = _missing(scheduler, request)
    if missing:
        scheduler.fail(
            request,
            InternalError(f"KV was called complete, but {len(missing)} blocks from block {missing[0]} on never came"),
        )
        return
    request.kv_complete = True
    _join_if_ready(scheduler, request)


def run_locally(scheduler: Scheduler, attempt: str) -> None:
    """Give up on remote KV. A request that is not admitted yet becomes an ordinary one where it stands in the queue."""
    request = scheduler.requests.get(attempt)
    if request is None:
        return
    if request.state is State.WAITING_FOR_REMOTE_KV:
        # Compute from the pinned prefix on, in the blocks that are counted for it already.
        del scheduler.remote[attempt]
        request.end_pulls()
        scheduler.kv.bind(request)
        request.covered.clear()
        request.layers_in.clear()
        request.move(State.RUNNING)
        scheduler.prefilling[attempt] = request
    elif request.state is State.WAITING:
        scheduler.waiting.remove(request)
        request.mode = KvMode.LOCAL
        scheduler.waiting.push_returned(request)


def fetch_again(scheduler: Scheduler, attempt: str) -> None:
    """See FetchAgain. What the host tier holds of it is given up."""
    request = scheduler.requests.get(attempt)
    if request is None or request.state is not State.PREEMPTED or not request.may_be_refetched:
        return
    scheduler.waiting.remove(request)
    scheduler.kv.free(request)
    request.mode, request.refetched = KvMode.REMOTE, True
    request.num_computed, request.kv_target, request.kv_complete = 0, request.num_tokens - 1, False
    request.move(State.WAITING)
    scheduler.waiting.push_returned(request)
    scheduler.refetches += 1


def _join_if_ready(scheduler: Scheduler, request: Request) -> None:
    """All KV but the last token's is here: the request runs, computing one token a step."""
    if request.state is not State.WAITING_FOR_REMOTE_KV:
        return
    group = request.choices
    if request.beams is not None:
        candidates = request.beams.first_candidates
        if candidates is not None and (request.kv_complete or request.max_tokens_total == request.num_prompt + 1):
            _join(scheduler, request)
            beams.offer(scheduler, request, list(candidates))
        return
    if group is not None and len(group.first_tokens) == len(group.numbers) and not request.num_outputs:
        # One token each is the end of them all: no KV is needed.
        if request.kv_complete or request.max_tokens_total == request.num_prompt + 1:
            _join(scheduler, request)
            results.spread(scheduler, request, [group.first_tokens[number] for number in group.numbers])
    elif request.kv_complete and request.num_outputs > 0:
        _join(scheduler, request)


def _join(scheduler: Scheduler, request: Request) -> None:
    del scheduler.remote[request.attempt]
    scheduler.kv.bind(request)
    request.move(State.RUNNING)
    scheduler.decoding[request.attempt] = request
    if request.kv_complete:
        request.num_computed = request.kv_target
        scheduler.kv.publish(request)
