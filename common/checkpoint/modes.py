"""When weights are hashed at a start. Imported by settings: loads nothing."""

from __future__ import annotations

CHANGED, ALWAYS = "changed", "always"
VERIFY_MODES = (CHANGED, ALWAYS)
