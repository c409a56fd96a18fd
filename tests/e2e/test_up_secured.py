"""`diptych up` with keys, TLS and mTLS between its parts: it serves, and the other commands find their way in by themselves."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.client import AuthenticationError, Client, Tls
from diptych.router.api.auth.keys import add_key

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WAIT_S = 300.0
Done = subprocess.CompletedProcess[str]


def issue(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """(authority, certificate, key) for 127.0.0.1."""
    authority = trustme.CA()
    ca, cert, key = (folder / f"{name}-{kind}.pem" for kind in ("ca", "cert", "key"))
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(ca))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(cert), append=True)
    issued.private_key_pem.write_to_path(str(key))
    return ca, cert, key


def test_keys_tls_and_mtls(cluster_module, tmp_path) -> None:
    ca, cert, key = issue(tmp_path, "public")
    cluster_ca, cluster_cert, cluster_key = issue(tmp_path, "inner")
    api_key, _ = add_key(tmp_path / "keys.json", "acme", now=0.0)
    flags = ["--keys-file", tmp_path / "keys.json", "--tls-cert", cert, "--tls-key", key, "--num-blocks", "64"]
    flags += ["--cluster-ca", cluster_ca, "--cluster-cert", cluster_cert, "--cluster-key", cluster_key]
    flags += ["--kv-encryption", "aes-gcm"]
    own = {"DIPTYCH_API_KEY": api_key}
    with cluster_module.running_cluster(tmp_path, *map(str, flags), extra_env=own) as cluster:
        assert cluster.http_url.startswith("https://")
        with httpx.Client(
            base_url=cluster.http_url, verify=ssl.create_default_context(cafile=str(ca)), timeout=WAIT_S
        ) as http:
            body = {
                "prompt": "Yes or no?",
                "guided_choice": ["größer", "nein"],
                "max_tokens": 8,
                "local_prefill_max_tokens": 0,
            }
            assert http.post("/v1/completions", json=body).status_code == 401
            headers = {"authorization": f"Bearer {api_key}", "x-diptych-explain": "1", "x-request-id": "mine"}
            answer = http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] in ("größer", "nein")
            assert answer.json()["diptych"]["local_prefill"] is False
        ask = {"prompt": "Yes or no?", "regex": "[ab]{3}", "max_tokens": 8, "timeout_s": WAIT_S}
        with Client(cluster.grpc_address, tls=Tls(str(ca)), api_key=api_key, lookaside=True) as client:
            assert set(client.generate(**ask).text) <= {"a", "b"}
        with Client(cluster.grpc_address, tls=Tls(str(ca)), api_key="") as client, pytest.raises(AuthenticationError):
            client.generate(**ask)

        def diptych(*args: str, said: str = "", key: str = api_key, here: bool = True) -> Done:
            """`here`: in the cluster's own folder, where the commands find everything but the key by themselves."""
            command = [sys.executable, "-P", "-m", "diptych.cli", *args]
            root = cluster.folder.root if here else tmp_path / "elsewhere"
            env = cluster_module.environment(root) | {"DIPTYCH_API_KEY": key}
            return subprocess.run(
                command, env=env, cwd=tmp_path, input=said, capture_output=True, text=True, timeout=300
            )

        to_grpc = ("--address", cluster.grpc_address, "--tls-ca", str(ca))
        to_http = ("--url", cluster.http_url, "--tls-ca", str(ca))
        chat = ("chat", "--max-tokens", "4", "--temperature", "0")
        answers = {
            (done := diptych(*chat, *way, said="Hello\n", here=not way)).stdout or done.stderr for way in ((), to_grpc)
        }
        assert len(answers) == 1, answers
        assert answers.pop().strip()
        for way in ((), to_grpc):
            what_if = diptych("what-if", "--prompt", "Hello", *way, here=not way)
            explain = diptych("explain", "mine", *way, here=not way)
            for done in (what_if, explain):
                assert (done.returncode, "prompt tokens" in done.stdout) == (0, True), done.stderr
        for way in ((), to_http):
            top = diptych("top", "--count", "1", *way, here=not way)
            assert (top.returncode, " ready " in top.stdout) == (0, True), top.stdout + top.stderr
        doctor = json.loads(diptych("doctor", "--json", "--sample-s", "0.2").stdout)
        unreachable = [v for v in doctor["verdicts"] if "UNAVAILABLE" in v["finding"]]
        assert not unreachable, unreachable
        assert len(doctor["verdicts"]) > 3
        # Without the key, without the authority, or with another authority the connection is rejected with a reason.
        other, _, _ = issue(tmp_path, "other")
        refused = {
            "this API key is not valid": diptych(*chat, said="Hello\n", key="dp-0000"),
            "requires a key": diptych("top", "--count", "1", key="dp-0000"),
            "cannot be reached": diptych("what-if", "--prompt", "a", *to_grpc[:3], str(other), here=False),
            "certificate verify failed": diptych("top", "--count", "1", *to_http[:3], str(other), here=False),
        }
        for why, done in refused.items():
            said = done.stdout + done.stderr
            assert (done.returncode, why in said) == (1, True), (why, said)
        # A stranger: no page without the key, no call to a worker without a certificate, and the key is shown nowhere.
        trust = ssl.create_default_context(cafile=str(ca))
        with httpx.Client(base_url=cluster.http_url, verify=trust, timeout=WAIT_S) as http:
            for page in ("/metrics", "/status.json", "/v1/models", "/v1/explain/mine"):
                assert http.get(page).status_code == 401, page
        for child in cluster.state.children:
            if child.role in ("prefill", "decode"):
                stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(child.address))
                with pytest.raises(grpc.RpcError) as failed:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert api_key not in " ".join(psutil.Process(child.pid).cmdline())
            assert api_key not in Path(child.log).read_text(errors="replace")
        assert api_key not in cluster.log()
