"""Whether the processes of the ranks are alive: pure, by what another thread reads of them.

A rank is lost when its process has ended, or was stopped (SIGSTOP) for a while. All are lost when a step runs and none gives a
sign of life. A step may take as long as it needs: its ranks count between layers. Where the CPU computes, it is a sign of life,
too, that it spends time on the ranks, or that a rank waits for it: so a layer may take long, also on a machine that is too busy.
A rank that waits for another one sleeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.1
_MOST_S = 2 * POLL_S
"""Of silence between two looks: more was a pause of this process, in which the ranks may have been paused, too."""
_CPU_SHARE = 0.2
"""Of a core, over all ranks; a rank that waits for another one uses less."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """`runs`: its main thread computes, or waits for the CPU or the disk. `cpu_s`: used since its start."""

    ended: bool = False
    stopped: bool = False
    runs: bool = False
    cpu_s: float = 0.0


def read_process(pid: int) -> ProcessState:
    """Of a child that nothing waits for meanwhile."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except OSError:
        return ProcessState(ended=True)
    state = fields[0]
    return ProcessState(state in "ZX", state in "Tt", state in "RD", (int(fields[11]) + int(fields[12])) * _TICK_S)


class Silence:
    """Of one source of signs of life. Pauses of the process that looks do not count. Args: most_s: then it is lost."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._silent_s = 0.0
        self._looked_at: float | None = None

    def lasts(self, now: float, *, came: bool) -> bool:
        """Args: came: a sign of life, since the last look. Returns: whether it is lost."""
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._silent_s = 0.0 if came else self._silent_s + min(elapsed, _MOST_S)
        return self._silent_s >= self.most_s


class Watch:
    """Args:
    silence_s: without a sign of life, while something is to be done; half of it for a process that is stopped.
    cpu_counts: computing is a sign of life.
    """

    def __init__(self, silence_s: float, *, cpu_counts: bool = True) -> None:
        self._silence_s, self.cpu_counts = silence_s, cpu_counts
        self._looked_at: float | None = None
        self._counters: Sequence[int] = ()
        self._cpu_s = 0.0
        self._silent_s = 0.0
        self._stopped_s: dict[int, float] = {}
        self._pulses: dict[int, int] = {}
        self._nodes: dict[int, Silence] = {}

    def look(
        self,
        now: float,
        *,
        busy: bool,
        counters: Sequence[int],
        processes: Sequence[ProcessState],
        pulses: Mapping[int, int] | None = None,
    ) -> str:
        """Args: busy: something that is watched is to be done. pulses: by the other hosts' numbers, how many signs of life came
        from each. Returns: why the ranks are lost; empty: they are not."""
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at, counted = now, min(elapsed, _MOST_S)
        for node, count in (pulses or {}).items():
            silence = self._nodes.setdefault(node, Silence(self._silence_s))
            came, self._pulses[node] = count != self._pulses.get(node), count
            if silence.lasts(now, came=came):
                return f"node {node} gave no sign of life for {self._silence_s:g} s"
        for rank, process in enumerate(processes):
            if process.ended:
                return f"rank {rank} ended"
            self._stopped_s[rank] = self._stopped_s.get(rank, 0.0) + counted if process.stopped else 0.0
            if self._stopped_s[rank] >= self._silence_s / 2:
                return f"rank {rank} is stopped"
        cpu_s = sum(process.cpu_s for process in processes)
        computes = cpu_s - self._cpu_s > _CPU_SHARE * max(elapsed, POLL_S) or any(one.runs for one in processes)
        worked = self.cpu_counts and computes
        if not busy or worked or list(counters) != list(self._counters):
            self._silent_s = 0.0
        else:
            self._silent_s += counted
        self._counters, self._cpu_s = list(counters), cpu_s
        if self._silent_s >= self._silence_s:
            return f"no rank made progress for {self._silence_s:g} s"
        return ""
