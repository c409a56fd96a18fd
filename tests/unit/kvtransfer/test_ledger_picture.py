"""The life cycle drawn at the top of the ledger is the one that the code has."""

from __future__ import annotations

import re

from diptych.kvtransfer.ledgers import ledger
from diptych.kvtransfer.ledgers import publisher_ledger as publishing
from diptych.kvtransfer.ledgers import reader_ledger as reading
from diptych.kvtransfer.ledgers.ledger import LEGAL_MOVES, SlabState

LINE = re.compile(r"^    ([A-Z_]+) +--(\w+)--> +([A-Z_]+)\b", re.MULTILINE)


def test_the_picture_names_events_and_moves_that_exist() -> None:
    first, second = (ledger.__doc__ or "").split("Slabs to read into")
    drawn = set()
    for text, module in ((first, publishing), (second, reading)):
        lines = LINE.findall(text)
        assert len(lines) >= 8
        for before, event, after in lines:
            assert isinstance(getattr(module, event, None), type), f"{module.__name__} has no event {event}"
            drawn.add((SlabState[before], SlabState[after]))
    assert drawn == LEGAL_MOVES
