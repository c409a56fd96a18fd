"""`diptych doctor` and `diptych top` on a remote cluster with TLS at the router and mTLS at the workers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from typer.testing import CliRunner

from diptych.cli.main import build_app
from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc

NAME = "router.example"


class Worker(worker_pb2_grpc.WorkerServicer):
    def GetStats(self, request: Any, context: Any) -> worker_pb2.GetStatsResponse:
        return worker_pb2.GetStatsResponse(transport_path="ucx:tcp", transport_bytes_per_s=2e9)

    def Audit(self, request: Any, context: Any) -> worker_pb2.AuditResponse:
        return worker_pb2.AuditResponse()


class Router(BaseHTTPRequestHandler):
    workers: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        status = {"ready": True, "reasons": [], "cluster": {"workers": self.workers}, "stages": {}, "counters": {}}
        status |= {"series": [], "running": 0, "waiting": 0, "model": "m"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(status).encode())

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Elsewhere:
    url: str
    public_ca: Path
    inside: dict[str, str]

    def run(self, command: str, *flags: str, env: dict[str, str] | None = None) -> Any:
        access = ["--url", self.url, "--tls-ca", str(self.public_ca), "--tls-server-name", NAME]
        return CliRunner().invoke(build_app(), [command, *access, *flags], env=env)


def issued(folder: Path, ca: trustme.CA, name: str) -> dict[str, str]:
    cert = ca.issue_cert(name, "localhost", "127.0.0.1")
    files = {part: str(folder / f"{name}.{part}") for part in ("ca", "cert", "key")}
    ca.cert_pem.write_to_path(files["ca"])
    cert.cert_chain_pems[0].write_to_path(files["cert"])
    cert.private_key_pem.write_to_path(files["key"])
    return files


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    public, inside = issued(tmp_path, trustme.CA(), NAME), issued(tmp_path, trustme.CA(), "worker.example")
    pair = (Path(inside["key"]).read_bytes(), Path(inside["cert"]).read_bytes())
    worker = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(), worker)
    port = worker.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], Path(inside["ca"]).read_bytes(), require_client_auth=True)
    )
    worker.start()
    known = {"id": "p0", "role": "prefill", "address": f"127.0.0.1:{port}", "index_mode": "EXACT"}
    Router.workers = [known | {"why_not": "", "kv_usage": 0.0, "running": 0, "waiting": 0}]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public["cert"], public["key"])
    router = HTTPServer(("127.0.0.1", 0), Router)
    router.socket = context.wrap_socket(router.socket, server_side=True)
    thread = threading.Thread(target=router.serve_forever, args=(0.01,))
    thread.start()
    yield Elsewhere(f"https://127.0.0.1:{router.server_port}", Path(public["ca"]), inside)
    router.shutdown()
    thread.join()
    router.server_close()
    worker.stop(None).wait()


def verdicts(result: Any) -> dict[str, str]:
    return {row["check"]: row["level"] for row in json.loads(result.stdout)["verdicts"]}


def test_flags_or_the_environment_open_a_guarded_cluster(elsewhere: Elsewhere) -> None:
    flags = [part for name, file in elsewhere.inside.items() for part in (f"--cluster-{name}", file)]
    environment = {f"DIPTYCH_CLUSTER_{name.upper()}": file for name, file in elsewhere.inside.items()}
    for given, env in ((flags, None), ([], environment)):
        result = elsewhere.run("doctor", "--json", "--sample-s", "0", *given, env=env)
        assert verdicts(result)["transport"] == "ok", result.output


def test_without_them_the_next_step_names_them(elsewhere: Elsewhere) -> None:
    reported = json.loads(elsewhere.run("doctor", "--json", "--sample-s", "0").stdout)["verdicts"]
    (lost,) = [row for row in reported if row["level"] == "unknown"]
    assert "p0" in lost["finding"]
    assert "--cluster-cert" in lost["next_step"]
    half = elsewhere.run("doctor", "--cluster-ca", elsewhere.inside["ca"])
    assert "cluster_cert" in str(half.exception)


def test_top_checks_whom_it_talks_to(elsewhere: Elsewhere) -> None:
    assert elsewhere.run("top", "--count", "1").exit_code == 0
    access = ["top", "--url", elsewhere.url, "--tls-ca", elsewhere.inside["ca"], "--count", "1"]
    wrong = CliRunner().invoke(build_app(), access)
    assert wrong.exit_code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in wrong.output
    plain = CliRunner().invoke(build_app(), ["top", "--url", "http://127.0.0.1:9", "--tls-ca", elsewhere.inside["ca"]])
    assert "https://" in str(plain.exception)
