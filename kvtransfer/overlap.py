"""Is a computed range worth sending while the rest of its prompt is computed? Pure.

A range that goes early saves the time that its bytes take after the last chunk, and costs a message of its own: a slab, an
announcement, a read and an unpack, on both sides. A range whose bytes take less than that waits and goes with the next one; so a
short prompt is sent in one piece, and a long one does not fall into crumbs.
"""

from __future__ import annotations

import sys

from diptych.common.errors import ConfigError

MODES = ("auto", "on", "off")
MESSAGE_S = 0.001
"""What one more message costs both workers together, about: an assumption on the high side, not a reading of this machine."""


def least_early_bytes(mode: str, bytes_per_s: float, *, message_s: float = MESSAGE_S) -> int:
    """A range of fewer bytes than this waits, until its prompt is computed.

    Args:
        mode: "on" sends whatever is computed, "off" nothing before the end, "auto" what is predicted to win.
        bytes_per_s: of the link; 0.0: unknown, and nothing waits.
    Raises: ConfigError.
    """
    if mode not in MODES:
        raise ConfigError("kv_overlap", mode, f"must be one of {', '.join(MODES)}")
    if mode == "off":
        return sys.maxsize
    return int(bytes_per_s * message_s) if mode == "auto" else 0
