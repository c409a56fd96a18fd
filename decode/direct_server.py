"""The server for clients: they submit requests directly, with a ticket signed by a router.

    client --Redeem(ticket)--> Session --checked Submit--> AttemptManager --> Attempt --events--> TicketObserver --> client
                                                               \\--redeemed, first token, end--> every router

It listens on a separate port with no other service: the worker's other port belongs to the private network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from diptych.common.adapters.load_errors import without_details
from diptych.common.addresses import host_port, is_wildcard
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.tls import load_client_tls
from diptych.decode.attempt_manager import AttemptManager, Session
from diptych.decode.outbox import Outbox
from diptych.decode.ticket_verifier import TicketVerifier
from diptych.engine.messages import TokensOut
from diptych.rpc.channels import bind, new_server
from diptych.rpc.errors import errors_to_status, from_failure, to_failure
from diptych.rpc.stubs import add_lookaside
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc
from diptych.worker.config import WorkerConfig

log = structlog.get_logger(__name__)

_MAX_BUFFER_BYTES = 8 * 1024 * 1024
_STOP_S = 1.0


class TicketObserver:
    """A client's outbox that reports each attempt's first token and end to the routers."""

    def __init__(self, outbox: Outbox, tell: Callable[[decode_pb2.TicketStatus], None]) -> None:
        self._outbox = outbox
        self._tell = tell
        self._sent = 0
        self.accepted = outbox.accepted
        self.prompt_logprobs = outbox.prompt_logprobs
        self.choice_finished = outbox.choice_finished

    def tokens(self, event: TokensOut, cached_tokens: int = 0) -> None:
        self._outbox.tokens(event, cached_tokens)
        if not self._sent:
            self._tell(decode_pb2.TicketStatus(attempt=event.attempt, first_token=True, cached_tokens=cached_tokens))
        self._sent += len(event.token_ids)

    def end(self, attempt: str, end: decode_pb2.End) -> None:
        if end.HasField("failure"):
            end.failure.CopyFrom(to_failure(without_details(from_failure(end.failure))))
        self._outbox.end(attempt, end)
        well = end.HasField("finished")
        self._tell(
            decode_pb2.TicketStatus(
                attempt=attempt,
                ended=True,
                completion_tokens=end.finished.usage.completion_tokens if well else self._sent,
                reason=end.failure.reason,
                finished=end.finished if well else None,
                prefill_faults=end.prefill_faults,
            )
        )


class LookasideServicer(decode_pb2_grpc.LookasideServicer):
    def __init__(self, intake: AttemptManager, verifier: TicketVerifier) -> None:
        self._intake = intake
        self._verifier = verifier

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.TicketCommands], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        session = self._intake.open_session(client=True, max_buffer_bytes=_MAX_BUFFER_BYTES)
        reader = asyncio.create_task(self._read(request_iterator, session), name="client reader")
        try:
            async with errors_to_status(context):
                while (batch := await session.outbox.next_batch()) is not None:
                    yield batch
        finally:
            reader.cancel()
            session.close()

    async def _read(self, messages: AsyncIterator[decode_pb2.TicketCommands], session: Session) -> None:
        try:
            async for message in messages:
                for redeem in message.redeem:
                    self._redeem(session, redeem)
                for attempt in message.cancel:
                    self._intake.cancel(session, attempt)
        except grpc.aio.UsageError:
            pass  # the call was cancelled
        finally:
            session.close()

    def _redeem(self, session: Session, message: decode_pb2.Redeem) -> None:
        try:
            submit = self._verifier.redeem(message)
        except DiptychError as error:
            session.outbox.end(message.attempt, decode_pb2.End(failure=to_failure(error)))
            return
        self._intake.send_ticket_status(decode_pb2.TicketStatus(attempt=submit.attempt, taken=True))
        self._intake.submit(session, submit, TicketObserver(session.outbox, self._intake.send_ticket_status))


class DirectEndpoint:
    """The server for clients. `verifier`: verifies the cluster's tickets."""

    def __init__(self, config: WorkerConfig, intake: AttemptManager, verifier: TicketVerifier) -> None:
        self._config = config
        self._intake = intake
        self._verifier = verifier
        self._server: grpc.aio.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def open(self) -> None:
        """Listen, and publish the address to the routers. Raises: ConfigError."""
        config = self._config
        assert config.client_port is not None
        tls = None
        if config.client_tls_cert and config.client_tls_key:
            tls = load_client_tls(config.client_tls_cert, config.client_tls_key)
        server = self._server = new_server()
        add_lookaside(LookasideServicer(self._intake, self._verifier), server)
        host = config.client_host or config.host
        credentials = None if tls is None else grpc.ssl_server_credentials([(tls.key, tls.cert)])
        port = bind(server, host, config.client_port, credentials)
        shown = config.client_advertise_host or config.advertise_host or host
        if is_wildcard(shown):
            raise ConfigError("client_advertise_host", shown, "clients cannot reach a wildcard address: name this host")
        self.address = host_port(shown, port)
        await server.start()
        self._task = asyncio.create_task(self._epochs(tls is not None), name="ticket epochs")
        log.info("accepting tickets of clients", address=self.address, tls=tls is not None)

    async def _epochs(self, tls: bool) -> None:
        while True:
            self._intake.set_direct_endpoint(
                decode_pb2.DirectEndpoint(address=self.address, tls=tls, ticket_epoch=self._verifier.epoch)
            )
            await asyncio.sleep(self._verifier.next_epoch_in_s)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(_STOP_S)
