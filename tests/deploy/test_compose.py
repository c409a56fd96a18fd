"""compose.yaml with podman: its `cpu` profile, requests across containers over UCX, a container of each kind killed.

Run by `make test-containers`, as a user who may run podman; build the images first (`make images`). podman's health
checks need systemd, so the test runs the commands of compose.yaml itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.up.processes import free_port
from diptych_tests import waiting
from diptych_tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "diptych-test"
KV_BYTES_PER_TOKEN = 46_080
START_S, REQUEST_S = 420.0, 120.0
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LONG = "Describe in a few words, for a curious child, what a diptych is, who painted the famous ones, how its panels are hinged. "
# Different from the first words on: a shared prefix would be cached on decode, and the rest be computed there.
QUESTIONS = [f"The {thing}. " + LONG * 3 for thing in ("wood", "gold", "paint", "hinge", "nail", "glue")]

pytestmark = [pytest.mark.containers, pytest.mark.slow]


def read(url: str, body: dict[str, Any] | None = None, timeout_s: float = 10.0) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-diptych-explain": "1"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as answer:
        text: str = answer.read().decode()
        return text


class Stack:
    """One compose project."""

    def __init__(self, secrets: Path) -> None:
        self.routers = [f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
        self.env = {
            **os.environ,
            "HTTP_PORT": self.routers[0].rpartition(":")[2],
            "HTTP_PORT_1": self.routers[1].rpartition(":")[2],
            "GRPC_PORT": str(free_port("127.0.0.1")),
            "GRPC_PORT_1": str(free_port("127.0.0.1")),
            "SECRETS_DIR": str(secrets),
            # What a laptop bears: about 1 GB and one thread a worker.
            "DIPTYCH_MAX_MODEL_LEN": "1024",
            "DIPTYCH_NUM_BLOCKS": "256",
            "LOAD_REQUESTS": "3",
            # Seven processes share few cores here.
            "DIPTYCH_HANDSHAKE_TIMEOUT_S": "30",
        }

    def compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        files = ["-f", "compose.yaml", "-f", "deploy/compose.lookaside.yaml"]
        command = ["podman-compose", "-p", PROJECT, *files, "--profile", "cpu", *arguments]
        return self._run(command, timeout_s).stdout

    def podman(self, *arguments: str, check: bool = True, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self._run(["podman", *arguments], timeout_s, check)

    def _run(self, command: list[str], timeout_s: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s)
        if check:
            assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    def name(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def healthy(self, service: str) -> bool:
        return self.podman("healthcheck", "run", self.name(service), check=False).returncode == 0

    def python(self, service: str, code: str) -> str:
        """Run Python inside a container, in its network."""
        return self.podman("exec", self.name(service), "python", "-c", code).stdout

    def scrape(self, target: str) -> str:
        code = f"import urllib.request as u; print(u.urlopen('http://{target}/metrics', timeout=300).read().decode())"
        return self.python("router-1", code)

    def logs(self) -> str:
        services = ("redis", *WORKERS, "router-0", "router-1")
        tails = (self.podman("logs", "--tail", "6", self.name(s), check=False) for s in services)
        return "\n".join(f"--- {s}\n{t.stdout}{t.stderr}" for s, t in zip(services, tails, strict=True))

    def wait(self, condition: Any, what: str, deadline_s: float = START_S) -> None:
        try:
            waiting.wait_until(condition, what=what, deadline_s=deadline_s, every_s=1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def ready(self, router: str) -> bool:
        try:
            return bool(json.loads(read(router + "/ready"))["ready"])
        except (OSError, ValueError):
            return False

    def noticed(self, router: str, victim: str) -> bool:
        """Whether a router no longer places on a worker."""
        workers = json.loads(read(router + "/status.json"))["cluster"]["workers"]
        return not any(worker["id"] == victim and not worker["why_not"] for worker in workers)

    def ask(self, router: str, question: str) -> tuple[str, dict[str, Any]]:
        # Prefill, whatever was measured of the two roles: where a question is computed is no matter of this test.
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 6, "temperature": 0}
        body |= {"local_prefill_max_tokens": 0}
        try:
            answer = json.loads(read(router + "/v1/chat/completions", body, REQUEST_S))
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"HTTP {error.code}: {error.read().decode()}\n{self.logs()}") from error
        return answer["choices"][0]["message"]["content"], answer["diptych"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    for tool in ("podman", "podman-compose"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH")
    secrets = tmp_path_factory.mktemp("secrets")
    subprocess.run(["python3", str(ROOT / "deploy" / "make_secrets.py"), str(secrets)], check=True)
    running = Stack(secrets)
    for image in ("localhost/diptych:dev", "localhost/diptych-redis:dev"):
        there = running.podman("image", "exists", image, check=False)
        assert there.returncode == 0, f"no image {image}: make images\n{there.stderr}"
    running.compose("down", "-t", "1")  # of a run that was cut off
    try:
        running.compose("up", "-d", "--no-build")
        for service in ("redis", *WORKERS, "router-0", "router-1"):
            running.wait(lambda s=service: running.healthy(s), f"{service} is healthy")
        for router in running.routers:
            running.wait(lambda r=router: running.ready(r), f"{router} is ready", 60.0)
        yield running
    finally:
        running.compose("down", "-t", "45")
    for kind in (("ps", "-aq"), ("network", "ls", "-q")):
        assert not running.podman(*kind, "--filter", f"label=io.podman.compose.project={PROJECT}").stdout.split()


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) | set(re.findall(r"^(\w+)[ {]", text, re.MULTILINE))


def test_a_cluster_of_containers_serves_and_survives(stack: Stack) -> None:
    # Across containers over UCX, through both routers.
    answers, moved = {}, 0
    for number, question in enumerate(QUESTIONS):
        text, why = stack.ask(stack.routers[number % 2], question)
        assert why["transport"] == "ucx:tcp", (why["notes"], why)
        assert why["prefill"].startswith("prefill-"), why
        assert why["decode"].startswith("decode-"), why
        assert why["kv_bytes"] > 0, why
        assert why["kv_bytes"] % KV_BYTES_PER_TOKEN == 0, why
        answers[question], moved = text, moved + why["kv_bytes"]
    assert all(answers.values())

    # The workers' counters match the answers, and every panel of the board names a metric of this scrape.
    scrapes = {f"{w}:9100": stack.scrape(f"{w}:9100") for w in WORKERS}
    scrapes |= {f"{r}:8000": stack.scrape(f"{r}:8000") for r in ("router-0", "router-1")}
    bytes_of = re.compile(r"^diptych_kv_transfer_bytes_total\{[^}]*\} (\S+)", re.M)
    for role in ("prefill", "decode"):
        texts = [text for target, text in scrapes.items() if target.startswith(role)]
        counted = [float(n) for text in texts for n in bytes_of.findall(text)]
        assert sum(counted) == moved, (role, counted)
    names = set().union(*map(metric_names, scrapes.values()))
    for board in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        asked = set(re.findall(r"diptych_\w+", board.read_text()))
        # OPTIONAL: of tenants, with a shadow policy, with several processes of a router, on a GPU.
        optional = load_script("deploy/grafana/panels.py").OPTIONAL
        assert {name for name in asked - names if not name.startswith(optional)} == set(), board

    # Only the routers are published, and Redis restricts each role to its own commands.
    for service in (*WORKERS, "redis"):
        assert stack.podman("port", stack.name(service)).stdout == ""
    code = (
        "import redis, tomllib; u = tomllib.load(open('/run/secrets/router.toml', 'rb'))['redis-url']\n"
        "r = redis.Redis.from_url(u)\n"
        "for command in (['SET', '{diptych}:x', '1'], ['FLUSHALL'], ['HGET', 'other', 'x']):\n"
        "    try: print(r.execute_command(*command))\n"
        "    except redis.exceptions.NoPermissionError: print('refused')\n"
    )
    assert stack.python("router-1", code).split() == ["refused"] * 3

    # A client on the private network streams from a decode worker directly; nothing else changes.
    code = (
        "from diptych.client import Client\n"
        f"messages = [{{'role': 'user', 'content': {QUESTIONS[0]!r}}}]\n"
        "with Client('router-0:50050', lookaside=True) as client:\n"
        "    print(client.generate(messages=messages, max_tokens=6, temperature=0.0).text, end='')\n"
    )
    assert stack.python("router-1", code) == answers[QUESTIONS[0]]
    tickets = re.compile(r'^diptych_placement_tickets_total{outcome="(\w+)",role="router",worker="[^"]+"} (\S+)', re.M)
    used = {"granted": "1.0", "finished": "1.0", "failed": "0.0", "lapsed": "0.0"}
    stack.wait(
        lambda: dict(tickets.findall(stack.scrape("router-0:8000"))) == used, "the ticket's end is told", REQUEST_S
    )

    # The load generator of the profile `load`, from the routers' network alone.
    report = stack.compose("--profile", "load", "run", "--rm", "--no-deps", "load")
    assert re.search(r"Successful requests: +3\b", report), report

    # One container of each kind is killed; the others answer the next requests with the same text.
    for victim, router in (("prefill-0", 0), ("decode-0", 0), ("router-0", 1)):
        stack.podman("kill", "--signal", "KILL", stack.name(victim))
        # What runs at the time of a death is another test's matter.
        stack.wait(lambda v=victim, r=router: stack.noticed(stack.routers[r], v), f"the death of {victim} is noticed")
        for question in QUESTIONS[:2]:
            text, why = stack.ask(stack.routers[router], question)
            assert text == answers[question], (victim, why)
