"""Where the settings look for the modes of overlap; the rule is the engine's."""

from __future__ import annotations

from diptych.engine.overlap import MODES as MODES
