# Every target sets up what it needs in .venv first; nothing but Python 3.11+ and make has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Its pins are older than what it works with, so it comes alone; what it imports is in pyproject.toml.
DIDCOMM := --no-deps didcomm==0.3.2

.PHONY: serve test check bench fuzz clean

$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e .
	$(BIN)/pip install --quiet $(DIDCOMM)
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.core
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/pip install --quiet -e '.[dev,fuzz]'
	@touch $@

serve: $(VENV)/.core  ## run the service on its embedded defaults: make serve ARGS="--nats 0.0.0.0:4222"
	$(BIN)/mediator serve $(ARGS)

test: $(VENV)/.dev  ## run every test: make test ARGS="-k fetch"
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## run the benchmarks and print the table of ratios: make bench ARGS="send fetch"
	$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(VENV)/.fuzz  ## fuzz the parsers for a minute each: make fuzz ARGS="--seconds 600"
	$(BIN)/python -m tests.fuzz $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
