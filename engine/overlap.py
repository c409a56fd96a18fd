"""Which parts of a prompt's KV to send while the rest is computed. Pure.

A range that is sent early saves the time that its bytes take after the last chunk. It costs one more message: a slab,
an announcement, a read and an unpack. A range whose bytes take less time than a message is sent with the next one, so a
short prompt is sent in one piece and a long one in few.

The last chunk can be sent in groups of layers, each as soon as it is computed:

    computing   |  group 1  |  group 2  |  group 3  |
    on the way              |--1--|     |--2--|     |--3--|
                                                    |exposed|

With n groups, an n-th of the bytes is sent after the last layer, and every message delays computing a little. On a link
that is slower than computing the bytes queue, and groups save what is sent before the end. `num_groups` compares both
by four figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from diptych.common.errors import ConfigError

MODES = ("auto", "on", "off")
MAX_GROUPS = 8
"""Layer groups of one range. More of them save less than the error of the figures."""
_GROUPS_WHEN_ON = 4


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a worker's prompts are sent.

    Args:
        mode: "on" sends whatever is computed, "off" nothing before the end, "auto" what is predicted to win.
        bytes_per_s: of a link that was not measured; 0.0: unknown, and no range waits.
        message_s: what one more message costs both workers together.
    Raises: ConfigError.
    """

    mode: str = "on"
    bytes_per_s: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("kv_overlap", self.mode, f"must be one of {', '.join(MODES)}")

    def least_early_bytes(self, link_bytes_per_s: float = 0.0) -> int:
        """A range of fewer bytes than this waits, until its prompt is computed.

        Args: link_bytes_per_s: what this peer measured; 0.0: nothing yet.
        """
        if self.mode == "off":
            return sys.maxsize
        rate = link_bytes_per_s or self.bytes_per_s
        return int(rate * self.message_s) if self.mode == "auto" else 0

    def num_groups(self, num_layers: int, size_bytes: int, chunk_s: float, link_bytes_per_s: float = 0.0) -> int:
        """Into how many groups of layers the last range is cut; 1: it goes in one piece when it is computed.

        Args:
            size_bytes: of the range, all layers.
            chunk_s: what computing the last chunk is expected to take; 0.0: nothing is known.
        """
        most = min(num_layers, MAX_GROUPS)
        if self.mode == "off" or most < 2:
            return 1
        if self.mode == "on":
            return min(most, _GROUPS_WHEN_ON)
        rate = link_bytes_per_s or self.bytes_per_s
        if rate <= 0.0 or chunk_s <= 0.0:
            return 1
        exposed = {n: exposed_s(n, size_bytes, chunk_s, rate, self.message_s) for n in range(1, most + 1)}
        best = min(exposed, key=lambda n: (exposed[n], n))
        # A gain below the cost of a message is within the error of the figures: send one piece.
        return best if exposed[1] - exposed[best] > self.message_s else 1


def exposed_s(num_groups: int, size_bytes: int, chunk_s: float, bytes_per_s: float, message_s: float) -> float:
    """What the client waits for after the last chunk would have been computed without any sending, by prediction."""
    arrived = 0.0
    for group in range(1, num_groups + 1):
        ready = chunk_s * group / num_groups + (group - 1) * message_s
        arrived = max(ready, arrived) + size_bytes / num_groups / bytes_per_s + message_s
    return arrived - chunk_s


def borders(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """After how many layers each group but the last is complete, rising."""
    return tuple(num_layers * group // num_groups for group in range(1, num_groups))
