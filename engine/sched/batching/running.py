"""Requests that run: prompts that are being computed, sequences that decode, and beams that wait for the others of
their attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice

from diptych.engine.sched.requests.request import Request


class RunningSet:
    """Every RUNNING request is in exactly one of `prefilling`, `decoding` and `paused`; the order of each is that of
    entry."""

    def __init__(self) -> None:
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._paused: dict[str, Request] = {}
        self._growing: list[Request] = []

    @property
    def prefilling(self) -> Mapping[str, Request]:
        """By attempt: more than one token is to be computed."""
        return self._prefilling

    @property
    def decoding(self) -> Mapping[str, Request]:
        """By attempt: everything but the last token is computed."""
        return self._decoding

    @property
    def paused(self) -> Mapping[str, Request]:
        """By attempt: beams that are computed and wait, with their blocks, for the others of their attempt."""
        return self._paused

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._paused)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._decoding.values(), self._prefilling.values(), self._paused.values())

    @property
    def tokens_to_compute(self) -> int:
        """What is left of the prompts that have begun."""
        return sum(len(request.token_ids) - request.num_computed for request in self._prefilling.values())

    def start_prefill(self, request: Request) -> None:
        self._prefilling[request.attempt] = request

    def start_decode(self, request: Request) -> None:
        """From prefilling, paused, or from outside."""
        self._prefilling.pop(request.attempt, None)
        self._paused.pop(request.attempt, None)
        self._decoding[request.attempt] = request

    def pause(self, request: Request) -> None:
        """A decoding beam has its candidates, and others of its attempt have not."""
        del self._decoding[request.attempt]
        self._paused[request.attempt] = request

    def remove(self, request: Request) -> None:
        """Out of whichever it is in, if any."""
        attempt = request.attempt
        if self._decoding.pop(attempt, None) is None and self._prefilling.pop(attempt, None) is None:
            self._paused.pop(attempt, None)

    def next_decodes(self, most: int) -> list[Request]:
        """The decoding requests of a step. Where there are more than `most`, those that are chosen go to the end, so
        that the next step chooses others."""
        decoding = self._decoding
        if len(decoding) <= most:
            return list(decoding.values())
        chosen = list(islice(decoding.values(), most))
        for request in chosen:
            decoding[request.attempt] = decoding.pop(request.attempt)
        return chosen

    def needs_block(self, request: Request) -> None:
        """A decoding request's next token needs a block of its own: `take_growing` has it before the next step."""
        self._growing.append(request)

    def take_growing(self) -> list[Request]:
        """Requests that needed a block since the last call; some may not run any more."""
        growing, self._growing = self._growing, []
        return growing
