"""The beams of one attempt: ordinary requests that share the prompt's blocks and advance together.

    the prompt is computed -> candidates of one row -> as many beams as live on, by copy-on-write forks
    a step computes some or all of them; who has its candidates waits (`scheduler.held`) until all have
        -> BeamSearch.advance: a beam with several children forks, one without any ends
    done: the best answers go out at once

They give way together, and come back together: a beam that waits for one that has no blocks would hold its own for nothing.
So an attempt is only taken if all of its beams, without a shared block, fit into the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.common.errors import DiptychError, InternalError, InvalidRequestError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.messages import Candidate, ChoiceFinished, Finished, TokensOut
from diptych.engine.sched.admission import make_output
from diptych.engine.sched.beam_search import Answer, BeamSearch, Child
from diptych.engine.sched.output import Finish
from diptych.engine.sched.request import Request, State

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler

NOTHING_LEFT = "allowed_token_ids, bad_words, logit_bias and min_tokens leave no token to go on with"


class Beams:
    """Args: leader: computes the prompt, and is the first beam."""

    def __init__(self, leader: Request, eos_token_ids: frozenset[int]) -> None:
        sampling = leader.sampling
        self.attempt = leader.attempt
        self.first = leader.choice
        self.members: dict[int, Request] = {leader.choice: leader}
        """Beams that live, by number."""
        self.width = sampling.beam_width
        self.first_candidates: tuple[Candidate, ...] | None = None
        """REMOTE: what prefill found behind the prompt, until the KV is here."""
        self.ready: dict[int, list[Candidate]] = {}
        """Of the beams that have been computed; the others are still to come."""
        self.search = BeamSearch(
            width=sampling.beam_width,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            max_outputs=max(1, leader.max_tokens_total - leader.num_prompt),
            end_ids=end_ids(sampling, eos_token_ids),
            first=leader.choice,
        )
        self._next = leader.choice + 1

    def next_number(self) -> int:
        self._next += 1
        return self._next - 1


def end_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer, as engine.sched.output has it."""
    ignored = sampling.ignore_eos and sampling.grammar is None
    return frozenset(sampling.stop_token_ids) | (frozenset() if ignored else eos_token_ids)


def offer(scheduler: Scheduler, beam: Request, candidates: list[Candidate] | None) -> None:
    """A running beam's row was computed; the last one to come moves them all on."""
    group = beam.beams
    assert group is not None
    if candidates is None:
        scheduler.fail(beam, InternalError(f"the runner gave no candidates for attempt {beam.public}"))
        return
    group.ready[beam.choice] = candidates
    if len(group.ready) < len(group.members):
        del scheduler.decoding[beam.attempt]
        scheduler.held[beam.attempt] = beam
        return
    ready, group.ready = group.ready, {}
    members = group.members
    children = group.search.advance(ready, lambda number: members[number].token_ids[beam.num_prompt :])
    if group.search.done:
        _give_out(scheduler, group, beam)
    else:
        _go_on(scheduler, group, children)


def give_up_candidates(beam: Request) -> None:
    """It is preempted: if its row was computed already, the last token is computed again when it comes back."""
    if beam.beams is not None and beam.beams.ready.pop(beam.choice, None) is not None:
        beam.num_computed -= 1


def _go_on(scheduler: Scheduler, group: Beams, children: list[Child]) -> None:
    """Fork before anything is freed or written: every parent's blocks are as its children need them."""
    named: dict[int, Child] = {}
    beams: dict[int, Request] = {}
    for child in children:
        number, beam = child.parent, group.members[child.parent]
        if number in named:
            number = group.next_number()
            beam = _fork(scheduler, group, group.members[child.parent], number)
        named[number], beams[number] = child, beam
    for number, beam in list(group.members.items()):
        if number not in named:
            scheduler.end(beam, State.FINISHED_STOPPED)
    for number, beam in beams.items():
        beam.token_ids.append(named[number].token_id)
        scheduler.held.pop(beam.attempt, None)
        scheduler.decoding[beam.attempt] = beam
        scheduler.kv.trim(beam)
        if scheduler.kv.needs_block(beam):
            scheduler.growing.append(beam)
    scheduler.generated += len(beams)
    group.search.go_on(named)


def _fork(scheduler: Scheduler, group: Beams, parent: Request, number: int) -> Request:
    beam = parent.twin(number)
    scheduler.kv.fork(parent, beam)
    scheduler.requests[beam.attempt] = beam
    scheduler.policy.entered(beam)
    group.members[number] = beam
    return beam


def _give_out(scheduler: Scheduler, group: Beams, beam: Request) -> None:
    wanted, answers = beam.sampling.n, group.search.finished
    if len(answers) < wanted:
        why = NOTHING_LEFT if not answers else f"beam search found {len(answers)} answers, not {wanted}"
        scheduler.fail(beam, InvalidRequestError(why, param="n" if answers else "allowed_token_ids"))
        return
    try:
        events, finishes = [], []
        for number, answer in enumerate(answers[:wanted], group.first):
            text, finish = _text_of(scheduler, beam, answer)
            tokens = answer.token_ids
            events.append(TokensOut(group.attempt, 0, tokens, text, number, answer.logprobs))
            stop_token = finish.stop_token_id
            finishes.append(ChoiceFinished(group.attempt, number, finish.reason, len(tokens), "", stop_token))
    except DiptychError as error:
        scheduler.fail(beam, error)
        return
    except Exception as error:  # one request's text must not end the engine
        scheduler.fail(beam, InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}"))
        return
    best, total = finishes[0], sum(one.num_output_tokens for one in finishes)
    stopped = best.reason is FinishReason.STOP
    for member in list(group.members.values()):
        scheduler.end(member, State.FINISHED_STOPPED if stopped else State.FINISHED_LENGTH)
    scheduler.groups.pop(group.attempt)
    for tokens_out, finished in zip(events, finishes, strict=True):
        scheduler.events.extend((tokens_out, finished))
    cached = beam.num_cached_tokens
    scheduler.events.append(Finished(group.attempt, best.reason, total, cached, "", best.stop_token_id))


def _text_of(scheduler: Scheduler, beam: Request, answer: Answer) -> tuple[str, Finish]:
    output = make_output(
        beam.sampling, scheduler.limits, beam.max_tokens_total - beam.num_prompt, scheduler.detokenizer_factory
    )
    text = "".join([output.push(token) for token in answer.token_ids])
    if output.finish is None:
        raise InternalError(f"attempt {beam.public}: an answer of beam search that has no end")
    return text, output.finish
