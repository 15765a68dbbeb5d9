# Targets: see `make help`. PYTHON=python3.12 make test selects the interpreter.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
SECONDS ?= 600
HINT = choose one, as in 'make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12'

.PHONY: help setup setup-train check-python test test-all demo layers lint format bench docs docs-serve mutations fuzz lock clean

help:
	@echo "make demo       install the train extra, then train a small capsule network on real digits (some minutes on two cores)"
	@echo "make test       install everything, then run the tests (a seeded sample of large products of cases)"
	@echo "make test-all   the same tests with every case"
	@echo "make lint       ruff, ruff format, pyright"
	@echo "make format     apply ruff's fixes and formatting"
	@echo "make layers     compare one layer of each routing with its paper's equations in plain loops"
	@echo "make bench      time and memory of layers and models against naive baselines (under ten minutes)"
	@echo "make mutations  check that the tests catch every bug listed in tests/mutations.toml"
	@echo "make fuzz       mutated files and runs, extreme values in layers, killed trainings (SEED=0 SECONDS=600)"
	@echo "make docs       build the site in site/, warnings are errors, links are checked (make docs-serve: with a server)"
	@echo "make lock       regenerate requirements/*.lock"
	@echo "PYTHON=...      interpreter of the environment (now: $(PYTHON); 3.11 or newer)"

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "torchcaps needs Python 3.11 or newer, and '$(PYTHON)' was not found: $(HINT)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "torchcaps needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1): $(HINT)." >&2; exit 1; }

setup: check-python
	@$(PYTHON) tools/setup.py dev

setup-train: check-python
	@$(PYTHON) tools/setup.py train

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --all-cases

demo: setup-train
	@$(BIN)/torchcaps train

layers: setup
	@$(BIN)/python tools/layers.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@$(BIN)/torchcaps bench --out results/bench/speed.json --figure docs/images/growth.png

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

mutations: setup
	$(BIN)/python tools/mutations.py --jobs 2

fuzz: setup
	$(BIN)/python -m tests.fuzz --seed $(SEED) --max-seconds $(SECONDS)

lock: setup
	$(BIN)/python tools/lock.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .cache site
