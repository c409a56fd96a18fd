"""Settings of a benchmark as flags: checked here, and converted to specs."""

from __future__ import annotations

import dataclasses
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diptych.common.errors import ConfigError
from diptych.loadtest.figures.slo import Slo, parse_slo
from diptych.loadtest.targets.target import Sampling, Target
from diptych.loadtest.targets.tenant_keys import read_tenant_keys
from diptych.loadtest.workloads import sizes, traces, workload
from diptych.loadtest.workloads.items import WorkItem
from diptych.loadtest.workloads.prompts import Form, PromptMaker
from diptych.loadtest.workloads.schedule import ClosedLoop, OpenLoop
from diptych.loadtest.workloads.traces import ReadSpec
from diptych.loadtest.workloads.workload import GENERATED, WorkloadSpec

WARMUP_TOKENS = 8
FILE_FORMATS = ("items", "mooncake", "azure", "burstgpt", "sharegpt", "prompts")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Settings of `diptych bench serve`, `sweep`, `compare` and `replay`.

    Args:
        model: "" uses the server's first.
        api: completions or chat, for HTTP targets; grpc for Diptych clusters (a grpc:// target has one API).
        workload: random, shared-prefix, conversation, agent or longdoc; or a file's format with --dataset: items,
            mooncake, azure, burstgpt, sharegpt, prompts.
        dataset: the file of a workload from a file.
        num_requests: number of requests; 0 with --dataset: all of it.
        input_len: tokens: 256, uniform:64,512, lognormal:256,0.6, exp:300, choice:64,1024; min= and max= bound it.
        output_len: tokens of the answers, as input_len.
        prefix_len: tokens of a shared system prompt.
        num_prefixes: number of different system prompts.
        turns: of a conversation, an agent or a document's questions.
        think_time: seconds between a conversation's turns, as input_len.
        tool_time: seconds of an agent's tool call, as input_len.
        document_len: tokens of a document, as input_len.
        request_rate: arrivals a second; inf: all at once.
        burstiness: 1 Poisson, below 1 bursts, above 1 more even, inf equal intervals.
        ramp_to: the rate changes to this over the run; 0: constant.
        max_concurrency: open loop: most requests at once, where waiting counts; closed loop: the users.
        closed_loop: users that send when their last answer has ended, instead of arrivals.
        time_scale: traces: 2 replays twice as fast.
        length_scale: traces: 0.125 makes every length an eighth.
        max_input_len: traces: longer prompts are cut; 0: no limit.
        max_output_len: traces: longer answers are cut; 0: no limit.
        cancel_rate: share of the requests that the client cancels midway.
        tenants: name:weight,... drawn for each session; over HTTP sent as `user` (and as --tenant-header); a server
            with keys identifies them by --tenant-keys.
        tenant_header: HTTP header with the tenant.
        tenant_keys: file of lines `tenant key`: each tenant's requests carry its API key, over HTTP and gRPC.
        ca_file: PEM file of the authorities to trust for https:// and grpcs://; default: the system's.
        prompt_form: ids (exact lengths), text or messages; "": ids, or messages for the chat API and text data.
        vocab: low,high of the random token ids.
        temperature: 0 is greedy.
        ignore_eos: answers of exactly output-len tokens, if the server supports the field.
        warmup: requests sent first, one by one, and left out of the figures.
        slo: ttft:200,tpot:50,e2e:5000 in milliseconds: the criteria of goodput.
        timeout_s: of one request.
        seed: of workload, arrivals and cancellations; -1: random for this run, and named in the report. With a fixed
            seed a second run finds the first one's prompts in the prefix cache.
        workers: number of workers behind the target, for tokens per worker; 0: unknown.
        explain: request the server's stage times (x-diptych-explain).
        api_key_env: name of the environment variable with the API key.
        out: folder for the reports.
        label: name of the run in reports and file names.
        save_items: write the workload beside the reports.
    """

    model: str = ""
    api: str = "completions"
    workload: str = "random"
    dataset: Path | None = None
    num_requests: int = 100
    input_len: str = "256"
    output_len: str = "64"
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 4
    think_time: str = "exp:1.0"
    tool_time: str = "exp:0.3"
    document_len: str = "1024"
    request_rate: float = 1.0
    burstiness: float = 1.0
    ramp_to: float = 0.0
    max_concurrency: int = 0
    closed_loop: bool = False
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_input_len: int = 0
    max_output_len: int = 0
    cancel_rate: float = 0.0
    tenants: str = ""
    tenant_header: str = ""
    tenant_keys: Path | None = None
    ca_file: Path | None = None
    prompt_form: str = ""
    vocab: str = "1000,30000"
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup: int = 2
    slo: str = "ttft:2000,tpot:200"
    timeout_s: float = 600.0
    seed: int = -1
    workers: int = 0
    explain: bool = True
    api_key_env: str = "OPENAI_API_KEY"
    out: Path = Path("bench-out")
    label: str = ""
    save_items: bool = False

    def __post_init__(self) -> None:
        if self.api not in ("completions", "chat", "grpc"):
            raise ConfigError("api", self.api, "must be completions, chat or grpc")
        if self.prompt_form not in ("", "ids", "text", "messages"):
            raise ConfigError("prompt_form", self.prompt_form, "must be ids, text or messages")
        if self.prompt_form == "messages" and self.api == "completions":
            raise ConfigError("prompt_form", self.prompt_form, "needs --api chat or a grpc:// target")
        if self.workload not in GENERATED + FILE_FORMATS:
            raise ConfigError("workload", self.workload, f"must be one of {', '.join(GENERATED + FILE_FORMATS)}")
        if (self.workload in FILE_FORMATS) != (self.dataset is not None):
            raise ConfigError("dataset", self.dataset, "requires a workload from a file, and vice versa")
        if self.warmup < 0 or self.workers < 0 or self.num_requests < 0:
            raise ConfigError("warmup", self.warmup, "warmup, workers and num_requests must not be negative")
        if self.seed < -1:
            raise ConfigError("seed", self.seed, "must be 0 or more, or -1 for a random one")
        if self.seed == -1:
            object.__setattr__(self, "seed", secrets.randbelow(2**31))
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError("timeout_s", self.timeout_s, "must be above 0")
        self.slo_spec()
        self.loop_spec()

    @property
    def form(self) -> Form:
        if self.prompt_form:
            form: Form = self.prompt_form  # type: ignore[assignment]
            return form
        if self.api == "chat":
            return "messages"
        return "text" if self.workload in ("sharegpt", "prompts") else "ids"

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.ignore_eos, self.explain, self.timeout_s)

    def slo_spec(self) -> Slo:
        return parse_slo(self.slo)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the workload itself causes prefix cache hits: prompts of one run have, or may have, a common prefix."""
        return self.workload != "random" or self.prefix_len > 0

    def loop_spec(self) -> OpenLoop | ClosedLoop:
        if self.closed_loop:
            return ClosedLoop(self.max_concurrency)
        return OpenLoop(self.request_rate, self.burstiness, self.ramp_to or None, self.max_concurrency)

    def workload_spec(self) -> WorkloadSpec:
        return WorkloadSpec(
            kind=self.workload,
            num_requests=self.num_requests or 1,
            input_len=sizes.parse("input_len", self.input_len),
            output_len=sizes.parse("output_len", self.output_len),
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
            turns=self.turns,
            think_time=sizes.parse("think_time", self.think_time),
            tool_time=sizes.parse("tool_time", self.tool_time),
            document_len=sizes.parse("document_len", self.document_len),
            tenants=workload.parse_tenants(self.tenants),
            cancel_rate=self.cancel_rate,
            form=self.form,
            vocab=self._vocab(),
            seed=self.seed,
        )

    def items(self) -> list[WorkItem]:
        """The workload, generated or read. Raises: ConfigError."""
        spec = self.workload_spec()
        if self.dataset is None:
            if not self.num_requests:
                raise ConfigError("num_requests", 0, "must be 1 or more unless a file is read")
            return workload.generate(spec)
        read = ReadSpec(
            maker=PromptMaker(self.form, self._vocab()),
            time_scale=self.time_scale,
            length_scale=self.length_scale,
            max_input_len=self.max_input_len,
            max_output_len=self.max_output_len,
            limit=self.num_requests,
            seed=self.seed,
        )
        return workload.dress(traces.read(self.dataset, self.workload, read), spec)

    def warmup_items(self) -> list[WorkItem]:
        """Generated from another seed, so that they warm no prefix of the measured requests; short answers."""
        if not self.warmup:
            return []
        spec = dataclasses.replace(
            self.workload_spec(), kind="random", prefix_len=0, num_requests=self.warmup, cancel_rate=0.0
        )
        short = dataclasses.replace(spec.output_len, high=min(spec.output_len.high, float(WARMUP_TOKENS)), low=0.0)
        spec = dataclasses.replace(spec, output_len=short)
        return workload.generate(dataclasses.replace(spec, seed=self.seed + 1_000_003))

    def as_dict(self) -> dict[str, Any]:
        return {
            key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(self).items()
        }

    def keys_of_tenants(self) -> dict[str, str]:
        """Tenant -> API key. Raises: ConfigError."""
        if self.tenant_keys is None:
            return {}
        return read_tenant_keys(self.tenant_keys, (name for name, _ in workload.parse_tenants(self.tenants)))

    def _vocab(self) -> tuple[int, int]:
        try:
            low, high = (int(part) for part in self.vocab.split(","))
        except ValueError:
            raise ConfigError("vocab", self.vocab, "must be low,high") from None
        return low, high


def make_target(text: str, config: BenchConfig, *, api_key: str = "") -> Target:
    """`[label=]URL`; http, https, grpc or grpcs. Raises: ConfigError."""
    label, equals, url = text.partition("=")
    if not equals or "://" in label:
        label, url = "", text
    tenant_keys, ca_file = config.keys_of_tenants(), str(config.ca_file) if config.ca_file else None
    if url.startswith(("grpc://", "grpcs://")):
        from diptych.loadtest.targets.grpc import GrpcTarget

        return GrpcTarget(
            url,
            label=label,
            model=config.model,
            sampling=config.sampling,
            api_key=api_key,
            tenant_keys=tenant_keys,
            ca_file=ca_file,
        )
    if url.startswith(("http://", "https://")):
        from diptych.loadtest.targets.openai import OpenAITarget

        api: Literal["completions", "chat"] = "chat" if config.api == "chat" else "completions"
        return OpenAITarget(
            url,
            label=label,
            model=config.model,
            api=api,
            sampling=config.sampling,
            api_key=api_key,
            tenant_header=config.tenant_header,
            tenant_keys=tenant_keys,
            ca_file=ca_file,
        )
    raise ConfigError("target", text, "must be http://host:port, https://..., grpc://host:port or grpcs://...")
