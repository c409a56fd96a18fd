"""`diptych health`: addresses rejected before connecting."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from diptych.cli.health import why_unhealthy
from diptych.common.errors import ConfigError


@pytest.mark.parametrize("address", ["prefill-0", "ftp://prefill-0:21/x", "prefill-0/x:1"])
def test_an_address_of_another_kind_is_named(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        why_unhealthy(address, timeout_s=1.0)
    assert caught.value.field == "address"


def test_nobody_there_is_said_in_the_systems_words() -> None:
    """It was Python's: <urlopen error [Errno 111] Connection refused>."""
    assert why_unhealthy("http://127.0.0.1:1", timeout_s=20.0) == "Connection refused"


class Fine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_router_with_tls_is_known_by_its_own_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issued, other = (trustme.CA().issue_cert("public.example") for _ in range(2))
    for name, cert in (("own", issued), ("other", other)):
        cert.cert_chain_pems[0].write_to_path(str(tmp_path / name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    server = HTTPServer(("127.0.0.1", 0), Fine)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"https://127.0.0.1:{server.server_port}/health"
    try:
        for name, words in (("own", ""), ("other", "CERTIFICATE_VERIFY_FAILED")):
            monkeypatch.setenv("DIPTYCH_TLS_CERT", str(tmp_path / name))
            why = why_unhealthy(url, timeout_s=60.0)
            assert words in why
            assert bool(why) == bool(words)
        monkeypatch.setenv("DIPTYCH_TLS_CERT", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="tls_cert"):
            why_unhealthy(url, timeout_s=60.0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
