import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import InvalidRequestError, TicketRefusedError
from diptych.common.ticket import MAGIC, seal, unseal
from diptych.decode.ticket_verifier import TicketVerifier
from diptych.rpc.v1 import decode_pb2

KEY = bytes(range(32))


def redeem(attempt="a", *, key=KEY, epoch=1, remaining_s=9.0, named=None, signed_s=30.0):
    claims = decode_pb2.TicketClaims(submit=decode_pb2.Submit(attempt=attempt, remaining_s=signed_s), epoch=epoch)
    ticket = seal(key, claims.SerializeToString())
    return decode_pb2.Redeem(attempt=named or attempt, ticket=ticket, remaining_s=remaining_s)


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def verifier(clock):
    return TicketVerifier(KEY, now=clock.now, epoch_s=10.0)


def test_a_ticket_brings_what_was_signed_with_the_shorter_deadline(verifier):
    assert verifier.redeem(redeem()).remaining_s == 9.0
    assert verifier.redeem(redeem("b", remaining_s=99.0)).remaining_s == 30.0


@pytest.mark.parametrize("position", [0, len(MAGIC), len(MAGIC) + 32, -1])
def test_a_changed_byte_is_refused(position):
    ticket = bytearray(seal(KEY, b"claims of some length"))
    ticket[position] ^= 1
    with pytest.raises(TicketRefusedError):
        unseal(KEY, bytes(ticket))


@pytest.mark.parametrize("ticket", [b"", b"DT2", b"x" * 100])
def test_what_is_no_ticket_is_refused(verifier, ticket):
    with pytest.raises(TicketRefusedError):
        verifier.redeem(decode_pb2.Redeem(attempt="a", ticket=ticket, remaining_s=1.0))


def test_another_clusters_key_is_refused(verifier):
    with pytest.raises(TicketRefusedError, match="not signed"):
        verifier.redeem(redeem(key=bytes(32)))


def test_sealed_nonsense_is_refused(verifier):
    with pytest.raises(TicketRefusedError, match="cannot be read"):
        verifier.redeem(decode_pb2.Redeem(attempt="a", ticket=seal(KEY, b"\xff\xff"), remaining_s=1.0))


def test_a_ticket_counts_once_and_for_its_own_attempt(verifier):
    with pytest.raises(TicketRefusedError, match="another attempt"):
        verifier.redeem(redeem(named="b"))
    verifier.redeem(redeem())
    with pytest.raises(TicketRefusedError, match="used before"):
        verifier.redeem(redeem())


def test_tickets_live_one_to_two_epochs(verifier, clock):
    assert verifier.epoch == 1
    clock.advance(19.9)
    verifier.redeem(redeem("a"))
    with pytest.raises(TicketRefusedError, match="used before"):
        verifier.redeem(redeem("a"))
    clock.advance(0.2)
    assert verifier.epoch == 3
    assert verifier.next_epoch_in_s == pytest.approx(9.9)
    with pytest.raises(TicketRefusedError, match="expired"):
        verifier.redeem(redeem("b"))
    with pytest.raises(TicketRefusedError, match="expired"):
        verifier.redeem(redeem("c", epoch=4))


@pytest.mark.parametrize("remaining_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_named_and_leaves_the_ticket_good(verifier, remaining_s):
    with pytest.raises(InvalidRequestError) as caught:
        verifier.redeem(redeem(remaining_s=remaining_s))
    assert caught.value.param == "remaining_s"
    verifier.redeem(redeem())
