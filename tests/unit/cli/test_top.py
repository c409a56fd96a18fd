"""`diptych top`: what a look shows."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from diptych.cli.status_client import StatusClient
from diptych.cli.top import by_age, line_of, recent, run_top, sparkline, view
from diptych.common.errors import AuthenticationError, ConfigError, NoWorkerError

POINT = {
    "age_s": 2, "ttft_p50": 0.1, "ttft_p95": 0.3, "itl_p50": 0.02, "itl_p95": 0.04, "tokens": 50, "prompt_tokens": 200,
    "cached_tokens": 50, "finished": 4, "failed": 1,
}  # fmt: skip
WORKER = {
    "id": "decode-0", "role": "decode", "state": "ready", "why_not": "", "running": 3, "waiting": 1, "max_num_seqs": 64,
    "waiting_prompt_tokens": 70, "kv_usage": 0.25, "prefill_tokens_per_s": 150.0, "decode_step_s": 0.03, "index_mode": "EXACT",
}  # fmt: skip
STATUS: dict[str, Any] = {
    "model": "m", "ready": True, "reasons": ["one thing"], "running": 3.0, "waiting": 1.0, "series": [POINT],
    "stages": {"queue": {"count": 1, "p50": 0.05, "p95": 0.05}, "transfer": {"count": 0, "p50": None, "p95": None}},
    "cluster": {"workers": [WORKER, {**WORKER, "id": "prefill-0", "why_not": "does not answer"}]},
}  # fmt: skip


def test_a_line_holds_the_last_ten_seconds() -> None:
    assert recent(STATUS)["requests_per_s"] == pytest.approx(0.4)
    line = line_of(STATUS, "12:00:00")
    for words in ("12:00:00 ready", "running=3", "req/s=0.4", "tok/s=5.0", "ttft_p95=300ms", "hit=25%", "failed=1"):
        assert words in line
    assert "decode-0=3r/1w/25%kv" in line
    assert "prefill-0=3r/1w/down" in line


def test_sparklines_leave_gaps_where_nothing_happened() -> None:
    assert sparkline([None, 1.0, 8.0]) == " ▂█"
    assert sparkline([None, None]) == "  "
    assert by_age([POINT], "tokens", span_s=3) == [None, 50, None, None]


def test_the_terminal_view_names_workers_and_reasons() -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(view(STATUS, 140, "http://h:1"))
    for words in ("m at http://h:1", "decode-0", "does not answer", "one thing", "25%", "queue 50 ms", "transfer -"):
        assert words in out.getvalue()


def test_23_ranks_are_a_column_where_a_worker_has_several() -> None:
    many = [
        {**WORKER, "tensor_parallel": 2, "pipeline": 3, "nodes": 3},
        {**WORKER, "id": "prefill-0", "tensor_parallel": 4, "nodes": 1},
    ]
    shown = []
    for workers in (many, [WORKER]):
        out = io.StringIO()
        Console(file=out, width=160).print(view({**STATUS, "cluster": {"workers": workers}}, 160))
        shown.append(out.getvalue())
    assert "ranks" in shown[0]
    assert [row.split()[-2] for row in shown[0].splitlines() if "EXACT" in row] == ["2x3@3", "4x1"]
    assert "ranks" not in shown[1]
    lines = [line_of({**STATUS, "cluster": {"workers": workers}}, "12:00:00") for workers in (many, [WORKER])]
    assert "decode-0=3r/1w/25%kv/ranks:2x3@3" in lines[0]
    assert "ranks" not in lines[1]


def test_every_model_is_shown() -> None:
    both = {**STATUS, "more_models": [{"model": "other", "cluster": {"workers": [{**WORKER, "id": "decode-9"}]}}]}
    assert "decode-9=3r/1w/25%kv" in line_of(both, "12:00:00")
    out = io.StringIO()
    Console(file=out, width=140).print(view(both, 140))
    row = next(line for line in out.getvalue().splitlines() if "decode-9" in line)
    assert row.split()[:2] == ["other", "decode-9"]
    assert "m, other" in out.getvalue()
    Console(file=out, width=140).print(view({**both, "more_models": [{"model": "young", "cluster": None}]}, 140))
    assert "m, young" in out.getvalue()


@pytest.mark.parametrize("width", [80, 60, 40])
def test_5_8_a_narrow_terminal_leaves_columns_out_and_cuts_no_name(width: int) -> None:
    names = ["decode-0", "prefill-in-a-long-statefulset-name-1"]
    busy = {
        **WORKER,
        "running": 64,
        "waiting": 500,
        "waiting_prompt_tokens": 123_456,
        "gpu": {"busy": 1, "throttled": []},
    }
    status = {**STATUS, "cluster": {"workers": [{**busy, "id": name} for name in names]}}
    out = io.StringIO()
    Console(file=out, width=width).print(view(status, width))
    shown = out.getvalue()
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert "…" not in shown
    assert "ready" in shown
    assert all(name in shown for name in names) or width == 40  # there it goes on in the next line
    plain = io.StringIO()
    Console(file=plain, width=80).print(view(STATUS, 80))
    for whole in ("decode-0", "prefill-0", "answer", "EXACT", "150", "30 ms", "25%", "3/64", "70"):
        assert whole in plain.getvalue()


class Router(BaseHTTPRequestHandler):
    status = 200
    body: bytes = b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router():
    server = HTTPServer(("127.0.0.1", 0), Router)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Router.status, Router.body = 200, json.dumps(STATUS).encode()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_in_a_pipe_each_look_is_a_line(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    pauses: list[float] = []
    assert run_top(StatusClient(router), every_s=2.0, count=3, sleep=pauses.append) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert pauses == [2.0, 2.0]


def test_what_cannot_be_asked_is_a_typed_error(router: str) -> None:
    Router.status = 401
    with pytest.raises(AuthenticationError, match="DIPTYCH_API_KEY"):
        StatusClient(router).get()
    Router.status, Router.body = 200, b"[]"
    with pytest.raises(NoWorkerError, match="not a router's status"):
        StatusClient(router).get()
    with pytest.raises(ConfigError, match="http://"):
        StatusClient("localhost:8000")


def test_18_5_a_gpu_is_shown_where_there_is_one() -> None:
    gpu = {"busy": 0.42, "memory_usage": 0.9, "power_watts": 300.0, "sm_clock_hz": 1e9, "throttled": ["hw_thermal"]}
    found = {**STATUS, "cluster": {"workers": [{**WORKER, "gpu": gpu}, {**WORKER, "id": "prefill-0", "gpu": None}]}}
    line = line_of(found, "12:00:00")
    assert "decode-0=3r/1w/25%kv/gpu:42%!hw_thermal" in line
    assert line.endswith("prefill-0=3r/1w/25%kv")
    out = io.StringIO()
    Console(file=out, width=140).print(view(found, 140))
    assert "42%!hw_thermal" in out.getvalue()
    out = io.StringIO()
    Console(file=out, width=140).print(view(STATUS, 140))
    assert "GPU" not in out.getvalue()
