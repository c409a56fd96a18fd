"""Token ids kept as the client's protobuf bytes: where they are only hashed, counted and passed on, no Python integers
are created. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.rpc.v1 import decode_pb2, router_pb2

_FIELD = bytes([decode_pb2.Submit.PROMPT_TOKEN_IDS_FIELD_NUMBER << 3 | 2])


@dataclass(slots=True)
class PackedIds:
    """Token ids in encoded form. `packed`: a TokenIdsInput, encoded; empty for no ids."""

    packed: bytes
    count: int

    @classmethod
    def of(cls, ids: router_pb2.TokenIdsInput) -> PackedIds:
        return cls(ids.SerializeToString(), len(ids.token_ids))

    def as_prompt(self) -> bytes:
        """The field prompt_token_ids of a Submit, encoded."""
        return _FIELD + self.packed[1:] if self.packed else b""


Unpack = Callable[[bytes, int], tuple[Sequence[int], int]]


def unpack(packed: bytes, count: int) -> tuple[Sequence[int], int]:
    """(the ids, the largest of them); at least one. Raises: ValueError unless there are `count`."""
    ids = tuple(router_pb2.TokenIdsInput.FromString(packed).token_ids)
    if len(ids) != count:
        raise ValueError(f"{len(ids)} token ids are packed, not {count}")
    return ids, max(ids)
