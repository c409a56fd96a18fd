"""Diptych's gRPC API, through the SDK."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from diptych.client import AsyncClient, Completion, DiptychError, RetryPolicy, StreamBrokenError, Tls, UnreachableError
from diptych.common.errors import NoWorkerError, OverloadedError, RequestDeadlineError
from diptych.loadtest.figures.record import Outcome, ServerFacts
from diptych.loadtest.targets.target import Ask, Chunk, Ended, Event, Sampling, TargetError


class GrpcTarget:
    """The SDK's retries are off: a refusal is a result.

    Args:
        url: grpc://host:port, grpcs:// with TLS.
        api_key: "" uses the SDK's (DIPTYCH_API_KEY).
        tenant_keys: tenant -> API key; each tenant's requests use a separate connection.
        ca_file: PEM file of the authorities to trust.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "",
        model: str = "",
        sampling: Sampling | None = None,
        api_key: str = "",
        tenant_keys: Mapping[str, str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.url = url
        self.label = label or url
        self._model = model
        self._sampling = sampling or Sampling()
        keys = dict(tenant_keys or {})
        self._keys = {"": api_key or next(iter(keys.values()), "")} | keys
        """By tenant; "": for the model's name, the warm-up, and tenants without a key."""
        self._tls = Tls(ca_file) if url.startswith("grpcs://") else None
        self._clients: dict[str, AsyncClient] = {}

    async def open(self) -> str:
        """Raises: TargetError."""
        address = self.url.partition("://")[2]
        for tenant, key in self._keys.items():
            retry = RetryPolicy(max_tries=1)
            self._clients[tenant] = AsyncClient(address, retry=retry, api_key=key or None, tls=self._tls)
        if not self._model:
            try:
                models = await self._clients[""].list_models()
                self._model = models[0].id
            except (UnreachableError, RequestDeadlineError) as error:
                raise TargetError(Outcome.ERROR, f"{self.url} does not answer: {error}") from None
            except DiptychError as error:
                raise TargetError(Outcome.ERROR, f"{self.url} refuses: {error}", status=error.http_status) from None
            except IndexError:
                raise TargetError(Outcome.ERROR, f"{self.url} names no model") from None
        return self._model

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def options(self, ask: Ask) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": self._sampling.temperature,
            "ignore_eos": self._sampling.ignore_eos,
            "explain": self._sampling.explain,
            "timeout_s": self._sampling.timeout_s,
            "request_id": ask.label,
        }
        if ask.token_ids:
            options["token_ids"] = ask.token_ids
        elif ask.messages:
            options["messages"] = [msgspec.to_builtins(message) for message in ask.messages]
        else:
            options["prompt"] = ask.text
        return options

    async def send(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """Raises: TargetError."""
        assert self._clients, "open() first"
        try:
            client = self._clients.get(ask.tenant, self._clients[""])
            async with client.stream(**self.options(ask)) as stream:
                async for delta in stream:
                    if delta.token_ids or delta.text:
                        yield Chunk(delta.text, delta.token_ids, len(delta.token_ids))
                yield _end_of(stream.result)
        except DiptychError as error:
            raise TargetError(_outcome(error), error.message, status=error.grpc_code) from None


def _end_of(result: Completion) -> Ended:
    reported = result.explanation
    server = (
        None if reported is None else ServerFacts(**{name: getattr(reported, name) for name in ServerFacts.__slots__})
    )
    usage = result.usage
    return Ended(result.finish_reason, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, server)


def _outcome(error: DiptychError) -> Outcome:
    match error:
        case OverloadedError() | NoWorkerError():
            return Outcome.REFUSED
        case RequestDeadlineError():
            return Outcome.TIMEOUT
        case StreamBrokenError():
            return Outcome.CUT
        case _:
            return Outcome.ERROR
