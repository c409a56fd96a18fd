"""The garbage collector of a process that serves."""

from __future__ import annotations

import subprocess
import sys


def test_it_rests_while_a_worker_loads_and_works_from_then_on() -> None:
    code = (
        "import gc, diptych.common.collector as collector\n"
        "collector.hold_collector()\n"
        "for _ in range(3000): cycle = []; cycle.append(cycle)\n"
        "held = gc.isenabled(), gc.get_count()[0] > 2500\n"
        "collector.set_collector()\n"
        "print(*held, gc.isenabled(), gc.get_count()[0] < 100, gc.get_freeze_count() > 0, gc.get_threshold()[0])"
    )
    child = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert child.stdout.split() == ["False", "True", "True", "True", "True", "50000"]
