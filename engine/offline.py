"""The production scheduler driven step by step, without threads: for benches, identity tests and simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import Clock, MonotonicClock
from diptych.common.errors import DiptychError, InternalError
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.disk_messages import BlockStore
from diptych.engine.executor import Executor
from diptych.engine.messages import (
    Admitted,
    Command,
    EngineEvent,
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    PrefillComplete,
    PromptLogprobs,
    TokenLogprobs,
    TokensOut,
)
from diptych.engine.sched.requests.output import DetokenizerFactory
from diptych.engine.sched.scheduler import Drafter


@dataclass(slots=True)
class OfflineResult:
    """One request's outputs; exactly one of `finished` and `error` is set. Times are on the engine's clock. What is not
    named otherwise is the first choice's."""

    attempt: str
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    other_choices: dict[int, list[int]] = field(default_factory=dict)
    """Token ids of the choices after the first."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """From the prompt's second token on."""
    num_cached_tokens: int = 0
    finished: Finished | None = None
    error: DiptychError | None = None
    added_at: float = 0.0
    token_times: list[float] = field(default_factory=list)


class OfflineEngine:
    """Args: as EngineClient; drafter: see Scheduler. `disk` is not begun: its replies are commands."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        identity: IdentityHeader,
        detokenizer_factory: DetokenizerFactory | None = None,
        *,
        clock: Clock | None = None,
        drafter: Drafter | None = None,
        disk: BlockStore | None = None,
    ) -> None:
        self.clock = clock or MonotonicClock()
        self.core = EngineCore(executor, config, identity, self.clock, detokenizer_factory, drafter, disk)

    def send(self, command: Command) -> None:
        self.core.handle(command)

    def step(self) -> list[EngineEvent]:
        """One step and its events; no events and no progress when nothing can be done."""
        self.core.step()
        return self.core.take_events()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def generate(self, requests: Sequence[EngineRequest], arrivals: Sequence[int] | None = None) -> list[OfflineResult]:
        """Run LOCAL requests to their ends.

        Args:
            arrivals: by request, the number of the step before which it is added (0: before the first); None: all at 0.
        Returns: results in the order of `requests`.
        Raises: InternalError when requests are left and nothing moves.
        """
        when = [0] * len(requests) if arrivals is None else list(arrivals)
        coming = sorted(range(len(requests)), key=lambda i: when[i])
        results = {r.attempt: OfflineResult(r.attempt, r.choice) for r in requests}
        left, step, given = len(results), 0, 0
        while left:
            while given < len(coming) and when[coming[given]] <= step:
                request = requests[coming[given]]
                results[request.attempt].added_at = self.clock.now()
                self.send(request)
                given += 1
            worked = self.core.step()
            events = self.core.take_events()
            left -= sum(self._note(event, results) for event in events)
            step += 1
            if not worked and not events and left:
                if given == len(coming):
                    raise InternalError(f"{left} requests are left and nothing moves")
                step = max(step, when[coming[given]])
        return [results[r.attempt] for r in requests]

    def _note(self, event: EngineEvent, results: dict[str, OfflineResult]) -> int:
        """Returns: 1 when the event ends a request."""
        match event:
            case Admitted(attempt, cached):
                results[attempt].num_cached_tokens = cached
            case PromptLogprobs(attempt, _, logprobs):
                results[attempt].prompt_logprobs.extend(logprobs)
            case TokensOut(attempt, _, token_ids, text, choice, logprobs):
                result = results[attempt]
                if choice != result.choice:
                    result.other_choices.setdefault(choice, []).extend(token_ids)
                    return 0
                result.logprobs.extend(logprobs)
                result.token_ids.extend(token_ids)
                result.text += text
                result.token_times.extend([self.clock.now()] * len(token_ids))
            case Finished(attempt):
                results[attempt].finished = event
                return 1
            case Failed(attempt, error):
                results[attempt].error = error
                return 1
            case PrefillComplete(_):
                return 1
        return 0
