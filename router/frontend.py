"""What the faces call: check and tokenize a request, then stream its answer. One object per router process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from diptych.router.config import RouterConfig
from diptych.router.messages import (
    Explanation,
    FinishedEvent,
    GenerateEvent,
    GenerateSpec,
    ModelInfo,
    PreparedRequest,
    StartedEvent,
    TokenEvent,
    UsageInfo,
)

__all__ = [
    "Explanation",
    "FinishedEvent",
    "Frontend",
    "GenerateEvent",
    "GenerateSpec",
    "ModelInfo",
    "PreparedRequest",
    "StartedEvent",
    "TokenEvent",
    "UsageInfo",
]


class Frontend:
    """Start it once; every method is called on the event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    async def start(self) -> None:
        """Load the tokenizer and begin to watch the cluster. Raises: ConfigError."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel what runs and release everything. Idempotent."""
        raise NotImplementedError

    def models(self) -> list[ModelInfo]:
        raise NotImplementedError

    def ready(self) -> tuple[bool, list[str]]:
        """Whether a request could be served now, and the reasons why not (or what is degraded)."""
        raise NotImplementedError

    async def prepare(self, spec: GenerateSpec) -> PreparedRequest:
        """Check everything, tokenize (off the event loop) and hash.

        Raises: InvalidRequestError (PromptTooLongError) naming the parameter, ModelNotFoundError.
        """
        raise NotImplementedError

    def generate(self, request: PreparedRequest) -> AsyncIterator[GenerateEvent]:
        """StartedEvent, TokenEvent*, FinishedEvent. Leaving the iterator (aclose) cancels the request on decode.

        Raises (while iterating): a DiptychError; before StartedEvent nothing of the answer was produced.
        """
        raise NotImplementedError
