# make setup | demo | test | layers | lint | format | bench | bench-rest | lock        (PYTHON=python3.12 make test picks the interpreter)
PYTHON ?= python3
BIN := .venv/bin
HINT = name one, as in 'make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12'

.PHONY: help setup test demo layers lint format bench bench-rest lock clean

help:
	@echo "make demo    set up, then train a small CapsNet on real digits: 'torchcaps train', about a minute on two cores"
	@echo "make layers  set up, then hold one layer of each routing against its paper's loops"
	@echo "make test    set up, then the whole test suite (under six minutes on two cores)"
	@echo "make lint    ruff, ruff format, pyright"
	@echo "make format  let ruff mend what it can"
	@echo "make bench   layers and models beside the usual way to write them: time and memory, under ten minutes"
	@echo "make bench-rest  the memory of training, what data and the loop cost"
	@echo "make lock    write requirements/*.lock anew"
	@echo "PYTHON=...   the interpreter to use (now: $(PYTHON); 3.11 or newer)"

setup:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "torchcaps needs Python 3.11 or newer, and there is no '$(PYTHON)' here: $(HINT)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "torchcaps needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1): $(HINT)." >&2; exit 1; }
	@$(PYTHON) tools/setup.py

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

demo: setup
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

bench-rest: setup
	@$(BIN)/python -m benchmarks.training_memory
	@$(BIN)/python -m benchmarks.data
	@$(BIN)/python -m benchmarks.training

lock: setup
	$(BIN)/python tools/lock.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
