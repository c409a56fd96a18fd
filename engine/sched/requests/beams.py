"""The beams of one attempt: sequences that share the prompt's blocks and advance together.

    the prompt is computed -> candidates of one row -> the beams of the next step, by copy-on-write forks
    a step computes some or all of them; a beam that has its candidates is paused until all have them
        -> BeamSearch.advance: a beam with several children forks, one without any ends
    done: the best answers are sent at once

Beams are preempted together and resumed together: a beam that waits for one without blocks would keep its own for
nothing. So an attempt is only accepted if all of its beams, without a shared block, fit into the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from diptych.common.errors import InternalError, InvalidRequestError
from diptych.common.sampling import FinishReason, SamplingParams
from diptych.engine.messages import Candidate, ChoiceFinished, EngineEvent, Finished, TokensOut
from diptych.engine.sched.requests.admission import ModelLimits, make_output
from diptych.engine.sched.requests.beam_search import Answer, BeamSearch, Child
from diptych.engine.sched.requests.output import DetokenizerFactory, Finish
from diptych.engine.sched.requests.request import Request, State

NOTHING_LEFT = "allowed_token_ids, bad_words, logit_bias and min_tokens leave no token to go on with"


class Beams:
    """Args: leader: computes the prompt, and is the first beam."""

    def __init__(self, leader: Request, eos_token_ids: frozenset[int]) -> None:
        sampling = leader.sampling
        self.attempt = leader.attempt
        self.first_candidates: tuple[Candidate, ...] | None = None
        """REMOTE: what prefill found behind the prompt, until the KV is here. The first ones count."""
        self.search = BeamSearch(
            width=sampling.beam_width,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            max_outputs=max(1, leader.max_tokens_total - leader.num_prompt),
            end_ids=end_ids(sampling, eos_token_ids),
            first=leader.choice,
        )
        self._first = leader.choice
        self._next = leader.choice + 1
        self._members: dict[int, Request] = {leader.choice: leader}
        self._ready: dict[int, list[Candidate]] = {}

    @property
    def members(self) -> Mapping[int, Request]:
        """Beams that have not ended, by number."""
        return self._members

    def add_candidates(self, beam: Request, candidates: list[Candidate]) -> list[Child] | None:
        """A beam's row was computed.

        Returns: the beams of the next step, none if the search is done; None while rows of other beams are missing.
        """
        self._ready[beam.choice] = candidates
        if len(self._ready) < len(self._members):
            return None
        ready, self._ready = self._ready, {}
        return self.search.advance(ready, lambda number: self._members[number].token_ids[beam.num_prompt :])

    def take_back_candidates(self, beam: Request) -> bool:
        """The beam is preempted before the search has advanced: its row is computed again when it resumes.

        Returns: whether the row was computed.
        """
        return self._ready.pop(beam.choice, None) is not None

    def fork(self, parent: int) -> Request:
        """A new beam with the parent's tokens; its blocks are still to be shared."""
        beam = self._members[parent].fork_beam(self._next)
        self._members[self._next] = beam
        self._next += 1
        return beam

    def leave(self, beam: Request) -> None:
        del self._members[beam.choice]
        self._ready.pop(beam.choice, None)

    def answers(
        self, beam: Request, limits: ModelLimits, detokenizer_factory: DetokenizerFactory | None
    ) -> list[EngineEvent]:
        """Events of the best answers of a search that is done, and of the attempt's end. Args: beam: any of them.

        Raises: InvalidRequestError where there are too few answers; InternalError where making text fails.
        """
        wanted, found = beam.sampling.n, self.search.finished
        if len(found) < wanted:
            reason = NOTHING_LEFT if not found else f"beam search found {len(found)} answers, not {wanted}"
            raise InvalidRequestError(reason, param="n" if found else "allowed_token_ids")
        events: list[EngineEvent] = []
        finishes: list[ChoiceFinished] = []
        for number, answer in enumerate(found[:wanted], self._first):
            prompt = beam.token_ids[: beam.num_prompt]
            output = make_output(
                beam.sampling, prompt, limits, beam.max_tokens_total - beam.num_prompt, detokenizer_factory
            )
            _, text = output.push_all(answer.token_ids)
            finish = _end_of(answer, output.finish, beam)
            tokens = answer.token_ids
            events.append(TokensOut(self.attempt, 0, tokens, text, number, answer.logprobs))
            finishes.append(ChoiceFinished(self.attempt, number, finish.reason, len(tokens), "", finish.stop_token_id))
            events.append(finishes[-1])
        best, total = finishes[0], sum(one.num_output_tokens for one in finishes)
        cached = beam.num_cached_tokens
        events.append(Finished(self.attempt, best.reason, total, cached, "", best.stop_token_id))
        return events


class BeamGroups:
    """The attempts with beam search. A group ends with its last member."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._groups: dict[str, Beams] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._groups

    def __iter__(self) -> Iterator[Beams]:
        return iter(self._groups.values())

    def open(self, request: Request) -> None:
        """`request` computes the prompt, and is the first beam."""
        group = self._groups[request.attempt_id] = Beams(request, self._eos_token_ids)
        request.seq.num_candidates = group.search.num_candidates

    def of(self, request: Request) -> Beams | None:
        return self._groups.get(request.attempt_id) if self._groups else None

    def running_with(self, request: Request) -> Sequence[Request]:
        """The request and, if it is a beam, the others of its attempt, as far as they run."""
        group = self.of(request)
        members = [request] if group is None else list(group.members.values())
        return [beam for beam in members if beam.state is State.RUNNING]

    def preempted_with(self, request: Request) -> Sequence[Request]:
        """All preempted beams of a preempted beam's attempt, which are admitted together; none if it is no beam."""
        if not self._groups or request.state is not State.PREEMPTED or (group := self.of(request)) is None:
            return ()
        return [beam for beam in group.members.values() if beam.state is State.PREEMPTED]

    def members(self, attempt_id: str) -> list[Request]:
        """Those that have not ended; none for an attempt that is no group."""
        group = self._groups.get(attempt_id)
        return [] if group is None else list(group.members.values())

    def leave(self, request: Request) -> None:
        """The request has ended. One that is in no group is ignored."""
        group = self.of(request)
        if group is None:
            return
        group.leave(request)
        if not group.members:
            del self._groups[request.attempt_id]


def end_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer, by the rule of engine.sched.requests.output."""
    ignored = sampling.ignore_eos and sampling.grammar is None
    return frozenset(sampling.stop_token_ids) | (frozenset() if ignored else eos_token_ids)


def stopped(events: Sequence[EngineEvent]) -> bool:
    """Whether the attempt that these events end was stopped by a token, and not by its length."""
    return isinstance(events[-1], Finished) and events[-1].reason is FinishReason.STOP


def _end_of(answer: Answer, finish: Finish | None, beam: Request) -> Finish:
    if finish is None:
        raise InternalError(f"attempt {beam.attempt_id}: an answer of beam search without an end: {answer.token_ids}")
    return finish
