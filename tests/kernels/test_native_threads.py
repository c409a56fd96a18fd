"""The helper threads of the compiled kernels: each task of each job runs once, on any number of threads, and no access races."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from diptych.kernels.native import build

JOBS = 3000
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include "threads.h"

static int hits[40]; /* each task writes its own */

static void work(const void *context, long task, int thread) {
    (void)thread;
    for (volatile int i = 0; i < *(const int *)context; i++) continue;
    hits[task]++;
}

int main(int count, char **arguments) {
    unsigned random = 1;
    (void)count;
    for (long job = 0; job < atol(arguments[1]); job++) {
        random = random * 1103515245 + 12345;
        int loops = random >> 16 & 255;
        long tasks = 1 + (random >> 8) % 40;
        for (int i = 0; i < 40; i++) hits[i] = 0;
        run_tasks(work, &loops, tasks, 1 + (random >> 20 & 3));
        for (int i = 0; i < 40; i++)
            if (hits[i] != (i < tasks)) return 1;
    }
    puts("every task once");
    return 0;
}
"""


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-g", "-fsanitize=thread")], ids=["plain", "thread sanitizer"])
def test_each_task_runs_once(compiler: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    source, program = tmp_path / "jobs.c", tmp_path / "jobs"
    source.write_text(PROGRAM)
    command = [compiler, *flags, "-pthread", f"-I{build.SOURCES.folder}", str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    sanitized = len(flags) > 1
    if made.returncode and sanitized:
        pytest.skip("the compiler is installed without its thread sanitizer")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program), str(JOBS)], capture_output=True, text=True, timeout=600, check=False)
    if sanitized and "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert (done.returncode, done.stdout) == (0, "every task once\n"), done.stderr[-4000:]
