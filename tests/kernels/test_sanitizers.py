"""The C sources under the address and the undefined-behaviour sanitizer, at the edges of every size and every width of vectors.

One process runs them all (sanitized.py), and then copies in which one step goes too far: each of those must be reported. What is
compiled costs the time, the decoder most of it: see BUILDS.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.common.compiled import ALL_LANES, CSources
from diptych.common.paths import cache_dir
from diptych.kernels.native import build, kv_move
from diptych.router.placement.native import library

SOURCES = {"decoder": build.SOURCES, "kv_move": kv_move.SOURCES, "lookup": library.SOURCES}
# After the sources' own: the last level counts. Not optimized: a few seconds instead of half a minute, and no access that
# the sanitizers would have seen is optimized away. They go on after a report, so that one process runs all libraries.
FLAGS = ("-O0", "-g1", "-fno-omit-frame-pointer")
ADDRESS, BOTH = "address", "address,undefined"
# Library, width of vectors, sanitizers. At 16 floats the decoder has instructions of its own, and most instances: addresses alone
# take a third of the time. The others are compiled in full runs (marked slow).
BUILDS: list[tuple[str, int | None, str]] = [
    ("decoder", 4, BOTH),
    ("decoder", 16, ADDRESS),
    *(("kv_move", lanes, BOTH) for lanes in ALL_LANES),
    ("lookup", None, BOTH),
]
OTHER_BUILDS: list[tuple[str, int | None, str]] = [("decoder", 8, BOTH), ("decoder", 16, BOTH)]
REPORTS = ("AddressSanitizer", "runtime error:")
OVERFLOW = "heap-buffer-overflow"
MUTATIONS = {
    # Library: file, what stands there, what stands in the copy, what must be reported. Only one goes too far inside memcpy, of
    # which one place is reported once in a process. The last one follows a wild block id, which ends the process.
    "kv_move-mutated": [
        ("kv_move.c", "update(&hash, to, size)", "update(&hash, to, size + 1)", rf"{OVERFLOW}[^=]*READ of size"),
    ],
    "lookup-mutated": [
        ("keys.h", "found == count ||", "found == count + 1 ||", rf"{OVERFLOW}[^=]*WRITE of size 4"),
        ("keys.h", "shift > 28", "shift > 70", "runtime error: shift exponent 70 is too large"),
    ],
    "decoder-mutated": [
        ("decoder.c", "i < size; i += LANES) squares", "i <= size; i += LANES) squares", rf"{OVERFLOW}[^=]*READ of size 16"),
        ("attention_tile.h", "i + r < count", "i + r <= count", rf"{OVERFLOW}[^=]*READ of size 8"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """Of gcc: it must be loaded before Python is."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc, whose sanitizers are used, is not installed")
    said = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60)
    found = Path(said.stdout.strip())
    if not found.is_absolute():
        pytest.skip("gcc is installed without its sanitizers")
    return str(found)


def sanitized(sources: CSources, how: str, folder: Path | None = None) -> CSources:
    return replace(
        sources,
        name=f"sanitized-{sources.name}",
        folder=folder or sources.folder,
        flags=(*sources.flags, *FLAGS, f"-fsanitize={how}", f"-fsanitize-recover={how}"),
    )


def compiled(sources: CSources, lanes: int | None) -> Path:
    """Once on a machine: the name of a library follows from what its sources say, and from where the compiler is."""
    return sources.build(cache_dir() / "native", shutil.which("gcc"), lanes)


def built(name: str, lanes: int | None, how: str) -> tuple[str, Path]:
    return name, compiled(sanitized(SOURCES[name], how), lanes)


def mutated(name: str, folder: Path) -> Path:
    sources = SOURCES[name.partition("-")[0]]
    shutil.copytree(sources.folder, folder / name)
    for file, right, wrong, _ in MUTATIONS[name]:
        path = folder / name / file
        text = path.read_text()
        assert text.count(right) == 1, f"{right} is not once in {file}"
        path.write_text(text.replace(right, wrong))
    lanes = 4 if name.startswith("decoder") else None
    how = BOTH if any("runtime error" in said for *_, said in MUTATIONS[name]) else ADDRESS
    return compiled(sanitized(sources, how, folder / name), lanes)


def run(sanitizer: str, libraries: list[tuple[str, Path]]) -> Mapping[str, str]:
    """By library, and by mutation: what was said."""
    environment = {
        **os.environ,
        "LD_PRELOAD": sanitizer,
        # Python frees little when it ends. Its small objects come from malloc, so that each has bounds.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=0:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-P", str(Path(__file__).with_name("sanitized.py"))]
    command += [f"{name}={path}" for name, path in libraries]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    parts = {title: said for title, _, said in (part.partition("\n") for part in done.stderr.split("\n== ")[1:])}
    assert len(parts) >= len(libraries), done.stderr[-8000:]
    return {title.partition("=")[0 if title.startswith(tuple(MUTATIONS)) else 2]: said for title, said in parts.items()}


@pytest.fixture(scope="module")
def reports(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("mutated")
    return run(sanitizer, [built(*some) for some in BUILDS] + [(name, mutated(name, folder)) for name in MUTATIONS])


def check_clean(reports: Mapping[str, str], count: int) -> None:
    clean = {path: said for path, said in reports.items() if path.endswith(".so")}
    assert len(clean) == count
    for path, said in clean.items():
        assert not any(report in said for report in REPORTS), f"{path}:\n{said[:4000]}"


def test_no_access_is_outside_and_no_behaviour_is_undefined(reports: Mapping[str, str]) -> None:
    check_clean(reports, len(BUILDS))


@pytest.mark.slow
def test_the_decoder_at_every_width_under_both(sanitizer: str) -> None:
    check_clean(run(sanitizer, [built(*some) for some in OTHER_BUILDS]), len(OTHER_BUILDS))


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in MUTATIONS.items() for change in changes]
)
def test_a_step_too_far_is_reported(reports: Mapping[str, str], name: str, change: tuple[str, ...]) -> None:
    assert re.search(change[3], reports[name]), f"{change}:\n{reports[name][:4000]}"
