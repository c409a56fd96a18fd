"""The parent of a router's processes: its ports, and the settings that it hands on."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.cli.router_processes import held_ports, settings_of_one
from diptych.common.errors import ConfigError
from diptych.router.config import RouterConfig
from diptych.router.processes.child import environment_of, settings_in
from diptych.router.server import listen

CONFIG = RouterConfig(
    model="/m", secret_file="s", http_port=0, grpc_port=0, router_processes=4, keys_file=Path("keys.json"),
    more_models=("a=b",), max_ttft_s=1.5, cors_origins=("*",),
)  # fmt: skip


def test_settings_arrive_as_they_are() -> None:
    assert settings_in(environment_of(CONFIG)) == CONFIG
    assert settings_in(environment_of(RouterConfig())) == RouterConfig()


def test_the_window_of_prompts_ahead_is_divided() -> None:
    assert settings_of_one(CONFIG) == replace(CONFIG, turn_window_s=CONFIG.turn_window_s / 4)
    assert settings_of_one(replace(CONFIG, turn_window_s=0.0)).turn_window_s == 0.0  # none waits


def test_held_ports_are_shared_with_the_processes_and_nobody_else() -> None:
    with held_ports(CONFIG) as ports:
        assert len(set(ports)) == 2
        for port in ports:
            with listen("127.0.0.1", port, reuse_port=True), listen("127.0.0.1", port, reuse_port=True):
                pass
            with pytest.raises(ConfigError, match="cannot be listened on"):
                listen("127.0.0.1", port)
        named = replace(CONFIG, http_port=ports[0])
        with pytest.raises(ConfigError, match=r"http_port.*cannot be used"), held_ports(named):
            pass
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", ports[0]))  # nothing listens yet
    with listen("127.0.0.1", ports[0]):
        pass


def test_connections_of_a_router_of_one_process_do_not_keep_several_out() -> None:
    with listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        server.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with held_ports(replace(CONFIG, http_port=port)) as ports:
        assert ports[0] == port


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_processes_is_bounded(count: int) -> None:
    with pytest.raises(ConfigError, match=r"router_processes.*between 1 and 64"):
        RouterConfig(router_processes=count)
