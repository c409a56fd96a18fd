"""Settings of the router process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from diptych.common.addresses import is_loopback
from diptych.common.errors import ConfigError
from diptych.router.api.http.options import HttpOptions
from diptych.router.placement.rollout import Rollout

PLACEMENT_POLICIES = ("cost", "round-robin", "random", "least-loaded", "power-of-two", "session-affinity")
"""The names of router.placement.policies, which is not imported for them: a command reads its settings before it loads numpy."""
ADMISSION_MODES = ("off", "shadow", "on")
"""Those of router.fairness.admission."""
MOST_PROCESSES = 64
DRAIN_S = 10.0
"""What running requests have to end once a router stops."""
CLOSE_S = 2.0
"""Then the servers have this to deliver errors."""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""That of common.store.adapters, for the same reason."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of the router.

    Args:
        host: interface of the two servers.
        http_port: of the OpenAI API, the status page and /metrics.
        grpc_port: of the SDK.
        router_processes: processes of this router, each a router of its own, behind the same two ports: about one core
            each. The kernel gives each its part of the connections.
        redis_url: redis://, rediss://, unix://, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE.
        redis_ca: PEM file with the authority of Redis's certificate, for rediss:// and rediss+sentinel://; empty: the system's.
        redis_cert: PEM file with our certificate, where Redis asks for one.
        redis_key: PEM file with the key of redis_cert.
        cluster: name of the cluster, a prefix of its keys in the store: several may share one.
        secret_file: the cluster secret, from which keys are derived; the workers have the same.
        model: local Hugging Face folder; only its tokenizer, template and configuration are read.
        served_model_name: the name clients use; empty: the folder's name.
        more_models: NAME=FOLDER of further models of this router; requests select one by name. Every model has separate
            workers, found in the same Redis.
        lora_modules: NAME=FOLDER of LoRA adapters to load at the start, unless the registry has the name; comma-separated, or
            several flags. The folders are the workers' (--lora-dir). With several models they are the first one's.
        max_model_len: prompt plus answer in tokens; None: the limit of the model and the workers.
        local_prefill_max_tokens: most uncached tokens that decode computes itself, where that costs less; 0: prefill
            always runs.
        request_timeout_s: deadline of a request without one; also the maximum.
        max_prompt_bytes: larger texts are rejected before they are tokenized.
        keys_file: API keys made by `diptych keys`; if set, every route but /live and /health and every gRPC method
            requires one.
        open_metrics: /metrics and /ready need no key: for scrapers, probes and gateways without one. They contain
            numbers only (and with tenant_metrics the tenants' names).
        access_log: one log line per request: id, label, tenant, workers, tokens, times.
        grpc_reflection: "on" lets clients such as grpcurl list the methods and messages; "auto" does so on a loopback
            address; "off". With keys it requires one.
        cors_origins: web pages from there (scheme://host[:port], or "*" for all) may call the API from a browser.
        unknown_fields: of a body: "ignore" names them in the response header x-diptych-warning, "refuse" rejects them
            with 400.
        http_head_timeout_s: seconds from a connection, or a request's first byte, to the end of the request's head;
            then it is closed.
        http_idle_timeout_s: how long a connection is kept between two requests; longer than clients and proxies keep theirs.
        http_event_ids: streams over HTTP have `id:` lines, by which they go on at another router when this one dies. Some
            tools that measure servers take every line for data, and need it off.
        tls_cert: PEM file with the certificate of both servers; if set, they use TLS only.
        tls_key: PEM file with the key of tls_cert.
        cluster_ca: PEM file with the CA for mTLS on every gRPC connection between routers and workers.
        cluster_cert: PEM file with this router's certificate for it.
        cluster_key: PEM file with the key of cluster_cert.
        cluster_tls_name: name that a worker's certificate must hold; empty: the host of its address.
        insecure: allow a server that other machines can reach without keys or TLS.
        tool_call_parser: hermes, llama3-json, mistral or a plug-in's name; "auto" chooses by the chat template, "none"
            rejects tools.
        reasoning_parser: "think" splits <think>...</think> from answers; "auto" chooses by the chat template, "none"
            does not.
        placement_policy: "cost" places by cache and load; round-robin, random, least-loaded, power-of-two and
            session-affinity exist for comparison.
        canary_workers: patterns of worker ids, with * and ?; only canary_share of the requests is served by them.
        canary_share: share of the requests that canary_workers serve, 0 to 1.
        shadow_workers: patterns of ids of workers that get copies of requests; their answers are discarded.
        shadow_share: share of the requests that are copied to shadow_workers, 0 to 1.
        placement_backend: "native" looks prompts up in C, compiled at the first start; "numpy" takes two to four times
            as long, with the same result; "auto" uses native if there is a C compiler, and logs if there is none.
        cache_ttl_s: how long a claim on cached KV lasts whose request names no time.
        max_cache_ttl_s: the longest time of such a claim, for tenants whose keys name none (`diptych keys add`).
        tenant_metrics: /metrics has series with tenants' names, for the tenants' dashboard.
        hot_prefix_copies: have a worker pull a prefix when requests with it take most of its holders' time. Off: a prefix is
            copied where queues cost more than pulling it, which in simulation was early enough.
        kv_pulls: a worker takes KV of a prompt's beginning from another worker that has it, where that is expected to be
            faster than computing.
        admission: "on" refuses (529, Retry-After) requests whose first token cannot come within max_ttft_s or their
            deadline, and whose pace is slower than max_tpot_s; "shadow" only counts them; "off" also serves requests that
            will be late in their turn.
        max_ttft_s: target of admission for the first token, from arrival; 0: the request's deadline.
        max_tpot_s: target of admission for the time per token after the first; 0: none.
        turn_window_s: seconds of prompts that the workers get ahead; further requests wait in the router, in turns by
            tenant and weight; 0: none waits.
        require_prefill: ready only once a compatible prefill and decode worker were seen (later decode alone is enough:
            it computes prompts itself). Without it, decode workers alone serve as a colocated cluster.
        lookaside: give placement tickets to SDK clients that request them; they stream directly from decode workers.
        worker_poll_s: pause between two polls of the workers' leases, and between two probes of a worker.
        worker_dead_s: a worker that has not answered for so long gets no requests; after up to three times as long, as its own
            past answers say, its requests move to others.
        worker_settle_s: a request without a usable decode worker waits until one was missing this long (since the start
            or since the last one was seen): in a rolling restart one is about to start.
        migration_attempts: how often an answer whose decode worker is lost goes on at another one, in a row without a new
            token (and four times as often in all); 0: a typed error after the first token.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "none" does not.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50050
    router_processes: int = 1
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_ca: str = ""
    redis_cert: str = ""
    redis_key: str = ""
    cluster: str = "diptych"
    secret_file: str = ""
    model: str = ""
    served_model_name: str = ""
    more_models: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    max_model_len: int | None = None
    local_prefill_max_tokens: int = 64
    request_timeout_s: float = 600.0
    max_prompt_bytes: int = 4 * 1024 * 1024
    generation_config: str = "auto"
    keys_file: Path | None = None
    open_metrics: bool = False
    access_log: bool = True
    grpc_reflection: str = "auto"
    cors_origins: tuple[str, ...] = ()
    unknown_fields: str = "ignore"
    http_head_timeout_s: float = 30.0
    http_idle_timeout_s: float = 120.0
    http_event_ids: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    cluster_tls_name: str = ""
    insecure: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    placement_policy: str = "cost"
    placement_backend: str = "auto"
    cache_ttl_s: float = 300.0
    max_cache_ttl_s: float = 86_400.0
    tenant_metrics: bool = False
    hot_prefix_copies: bool = False
    kv_pulls: bool = True
    admission: str = "on"
    max_ttft_s: float = 0.0
    max_tpot_s: float = 0.0
    turn_window_s: float = 2.0
    require_prefill: bool = True
    canary_workers: tuple[str, ...] = ()
    canary_share: float = 0.0
    shadow_workers: tuple[str, ...] = ()
    shadow_share: float = 0.0
    lookaside: bool = True
    worker_poll_s: float = 0.25
    worker_dead_s: float = 2.0
    worker_settle_s: float = 5.0
    migration_attempts: int = 3

    @property
    def serves_reflection(self) -> bool:
        return self.grpc_reflection == "on" or (self.grpc_reflection == "auto" and is_loopback(self.host))

    @property
    def http(self) -> HttpOptions:
        """Raises: ConfigError."""
        return HttpOptions(
            self.cors_origins,
            self.unknown_fields,
            self.http_head_timeout_s,
            self.http_idle_timeout_s,
            self.http_event_ids,
        )

    @property
    def rollout(self) -> Rollout:
        return Rollout(self.canary_workers, self.canary_share, self.shadow_workers, self.shadow_share)

    @property
    def model_folders(self) -> dict[str, str]:
        """Folder by name, in the order of the settings. Raises: ConfigError."""
        found = {self.served_model_name or Path(self.model).name: self.model}
        for entry in self.more_models:
            name, _, folder = entry.partition("=")
            if not name or not folder:
                raise ConfigError("more_models", entry, "must be NAME=FOLDER")
            if name in found:
                raise ConfigError("more_models", entry, "another model has this name")
            found[name] = folder
        return found

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folder of each adapter to load at the start, by name. Raises: ConfigError."""
        return lora_modules(self.lora_modules)

    def __post_init__(self) -> None:
        _ = self.model_folders
        for name in self.adapter_folders:
            if name in self.model_folders:
                raise ConfigError("lora_modules", name, "is the name of a model")
        _ = self.rollout  # its constructor checks them
        _ = self.http
        for name in ("http_port", "grpc_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                raise ConfigError(name, port, "must be between 0 and 65535")
        for name in (
            *("request_timeout_s", "worker_poll_s", "worker_dead_s", "worker_settle_s"),
            *("cache_ttl_s", "max_cache_ttl_s"),
        ):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(name, getattr(self, name), "must be above 0 and finite")
        for name in ("max_ttft_s", "max_tpot_s", "turn_window_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(name, getattr(self, name), "must be 0 or more, and finite")
        if not 0 <= self.local_prefill_max_tokens < 2**31:
            raise ConfigError("local_prefill_max_tokens", self.local_prefill_max_tokens, "must be 0 or more")
        if not 0 <= self.migration_attempts <= 100:
            raise ConfigError("migration_attempts", self.migration_attempts, "must be between 0 and 100")
        if not 1 <= self.router_processes <= MOST_PROCESSES:
            raise ConfigError("router_processes", self.router_processes, f"must be between 1 and {MOST_PROCESSES}")
        if self.max_model_len is not None and not 2 <= self.max_model_len < 2**31:
            raise ConfigError("max_model_len", self.max_model_len, "must be at least 2 and below 2^31")
        if not 1 <= self.max_prompt_bytes <= 1 << 30:
            raise ConfigError("max_prompt_bytes", self.max_prompt_bytes, "must be at least 1 and at most 1 GiB")
        if self.grpc_reflection not in ("auto", "on", "off"):
            raise ConfigError("grpc_reflection", self.grpc_reflection, "must be auto, on or off")
        if (self.tls_cert is None) != (self.tls_key is None):
            name = "tls_cert" if self.tls_cert is None else "tls_key"
            raise ConfigError(name, None, "must be set too: TLS needs a certificate and its key")
        if not (is_loopback(self.host) or self.insecure or (self.keys_file and self.tls_cert)):
            missing = " and ".join(
                name for name, value in (("keys_file", self.keys_file), ("tls_cert", self.tls_cert)) if not value
            )
            raise ConfigError(
                "host", self.host, f"other machines can reach it: set {missing} as well, or --insecure if you must"
            )
        for name, known in (("placement_policy", PLACEMENT_POLICIES), ("admission", ADMISSION_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        if self.reasoning_parser not in ("auto", "none", "think"):
            raise ConfigError("reasoning_parser", self.reasoning_parser, 'must be "auto", "think" or "none"')
        if self.placement_backend not in ("auto", "native", "numpy"):
            raise ConfigError("placement_backend", self.placement_backend, 'must be "auto", "native" or "numpy"')
        if self.generation_config not in ("auto", "none"):
            raise ConfigError("generation_config", self.generation_config, 'must be "auto" or "none"')


_SECOND_MODULE = re.compile(r"\s[A-Za-z0-9._:/-]+=")
_NEEDS_QUOTES = re.compile(r",|\s[A-Za-z0-9._:/-]+=")
"""Of a folder that NAME=FOLDER cannot hold."""


def lora_modules(entries: tuple[str, ...]) -> dict[str, str]:
    """Folder by name of entries NAME=FOLDER, or vLLM's {"name": ..., "path": ...}. Raises: ConfigError."""
    found: dict[str, str] = {}
    for entry in entries:
        name, folder = _json_module(entry) if entry.lstrip().startswith("{") else _plain_module(entry)
        if not ADAPTER_NAME.fullmatch(name) or not folder:
            raise ConfigError("lora_modules", entry, "must be NAME=FOLDER, the name of letters, digits or ._:/-")
        if name in found:
            raise ConfigError("lora_modules", entry, "another adapter has this name")
        found[name] = folder
    return found


def _plain_module(entry: str) -> tuple[str, str]:
    name, _, folder = entry.partition("=")
    if _SECOND_MODULE.search(folder):
        rule = "several adapters: repeat the flag, or put commas between them"
        raise ConfigError("lora_modules", entry, rule)
    return name, folder


def _json_module(entry: str) -> tuple[str, str]:
    """`base_model_name` may be there, as for vLLM: here the base model is the served one."""
    rule = 'must be a JSON object as {"name": "NAME", "path": "FOLDER"}'
    try:
        fields = json.loads(entry)
    except (ValueError, RecursionError) as error:
        raise ConfigError("lora_modules", entry, f"{rule}: {error}") from None
    unknown = sorted(fields.keys() - {"name", "path", "base_model_name"})
    if unknown:
        raise ConfigError("lora_modules", entry, f"{rule}, without {', '.join(map(repr, unknown))}")
    name, folder = fields.get("name"), fields.get("path")
    if not isinstance(name, str) or not isinstance(folder, str):
        raise ConfigError("lora_modules", entry, rule)
    return name, folder


def absolute_modules(entries: tuple[str, ...]) -> tuple[str, ...]:
    """The same with absolute folders, of workers on this machine, each one value of a flag. Raises: ConfigError."""
    found = {name: str(Path(folder).expanduser().absolute()) for name, folder in lora_modules(entries).items()}
    return tuple(
        json.dumps({"name": name, "path": folder}) if _NEEDS_QUOTES.search(folder) else f"{name}={folder}"
        for name, folder in found.items()
    )
