"""The first request of `up`."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from diptych.cli.up.readiness import NotServingYet, first_answer, unserved_adapters


@pytest.mark.parametrize(("status", "kind"), [(503, NotServingYet), (500, RuntimeError)])
def test_a_router_process_that_knows_no_worker_yet_is_asked_again(status, kind):
    """With several router processes another one had said that it is ready: `up` ended there."""

    class Router(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(RuntimeError) as error:
            first_answer("127.0.0.1", server.server_port, timeout_s=60.0)
        thread.join()
    assert type(error.value) is kind


def test_adapters_that_could_not_be_loaded_are_named_when_the_cluster_is_ready():
    body = '{"ready": true, "reasons": ["p0 is being connected", "adapter poems: worker d0: no such file"]}'
    assert unserved_adapters(body) == ["adapter poems: worker d0: no such file"]
    assert unserved_adapters('{"ready": true, "rea') == []
