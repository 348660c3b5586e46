# Every target sets up what it needs in .venv first; nothing but Python 3.11+ and make has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Tests at the same time; each has its servers to itself, and most of them wait for those. Slow ones compute more.
JOBS ?= 5
SLOW_JOBS ?= 3
# The other v2 envelope library, for tests. Its pins exclude ours, so it comes alone; what it imports is in [test].
DIDCOMM := didcomm==0.3.2
# What finds faults of accessibility: the script in it, without the driver of browsers that it is made for.
AXE := axe-playwright-python==0.1.8
# A peer of tests and benchmarks, with pins that exclude ours. It runs on Python 3.11.
ACAPY := aries-cloudagent[askar]==0.12.8
ACAPY_PYTHON ?= $(PYTHON)
# A server of models, for tests; its pins exclude ours too.
INFINITY := infinity-emb[server,torch]==0.0.78 torch==2.13.0
# What runs the example of a DAG; its pins exclude ours.
AIRFLOW := apache-airflow-core==3.3.2 apache-airflow-providers-standard==1.21.0
# Another peer of tests: Credo in two editions, which need Node 20, and a C++ compiler for two of their packages.
CREDO := tests/slow/peers/credo
# The Identus SDK needs Node 20 as well.
IDENTUS := tests/slow/peers/identus
NODE_ROOT = $(shell node -p 'require("path").resolve(process.execPath, "../..")')
# Compiled with node's own headers where they are installed; npm downloads them otherwise.
NODE_HEADERS = $(if $(wildcard $(NODE_ROOT)/include/node/node.h),npm_config_nodedir=$(NODE_ROOT))
# What semantic search must reach on four public benchmarks, as nDCG@10.
FLOORS ?= $(addprefix --floor ,livemcp=.69 metatool=.76 toolbench=.83 sealtools=.94 mean=.82)

.DEFAULT_GOAL := help
# Tests start hundreds of processes; without kept bytecode each compiles the whole service anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help serve dist test test-slow check docs screenshots unit lock newcomers bench eval fuzz pipeline-demo peers clean

MADE_OF := pyproject.toml constraints.txt hatch_build.py $(wildcard minilm/*.py minilm/*.safetensors weblib/*.py)
# uv installs the 250 packages of [dev] in a minute, where pip needs five; each in the version of constraints.txt, so that
# a release of somebody else breaks nobody's checkout.
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --python $(BIN)/python --constraints constraints.txt

$(VENV)/.uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet 'uv>=0.9'
	@touch $@

# Not --quiet: who runs the service for the first time waits for this, and sees how far it is.
$(VENV)/.core: $(MADE_OF) | $(VENV)/.uv
	$(UV) pip install --python $(BIN)/python --constraints constraints.txt -e '.[search]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.core
	$(INSTALL) -e '.[test]'
	$(INSTALL) --no-deps $(DIDCOMM)
	@touch $@

$(VENV)/.dev: $(MADE_OF) | $(VENV)/.uv
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps $(DIDCOMM) $(AXE)
	@touch $(VENV)/.core $(VENV)/.test $(VENV)/.docs $@

$(VENV)/.pipeline: $(VENV)/.core
	$(INSTALL) -e '.[pipeline]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.uv
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(INSTALL) -e '.[dev,fuzz]'
	@touch $@

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.core  ## run the service on its embedded defaults: make serve ARGS="--nats 0.0.0.0:4222"
	$(BIN)/mediator serve $(ARGS)

dist: | $(VENV)/.uv  ## build the wheels of service and client, and the sdist, into dist/
	rm -rf dist
	$(UV) build --quiet --python $(BIN)/python
	$(UV) build --quiet --python $(BIN)/python --wheel --out-dir dist packages/client

$(VENV)-acapy/.done: | $(VENV)/.uv
	$(UV) venv --quiet --clear --python $(ACAPY_PYTHON) $(VENV)-acapy
	$(UV) pip install --quiet --python $(VENV)-acapy '$(ACAPY)'
	@touch $@

$(CREDO)/%/node_modules/.installed: $(CREDO)/%/package-lock.json $(CREDO)/%/.npmrc
	cd $(CREDO)/$* && npm ci --loglevel=error
	cd $(CREDO)/$* && $(NODE_HEADERS) npm rebuild --silent --ignore-scripts=false @2060.io/ffi-napi @2060.io/ref-napi
	@touch $@

$(IDENTUS)/node_modules/.installed: $(IDENTUS)/package-lock.json $(IDENTUS)/.npmrc
	cd $(IDENTUS) && npm ci --loglevel=error
	@touch $@

$(VENV)-infinity/.done: | $(VENV)/.uv
	$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)-infinity
	$(UV) pip install --quiet --python $(VENV)-infinity $(INFINITY)
	@touch $@

$(VENV)-airflow/.done: | $(VENV)/.uv
	$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)-airflow
	$(UV) pip install --quiet --python $(VENV)-airflow $(AIRFLOW)
	@touch $@

peers: $(VENV)-acapy/.done $(VENV)-infinity/.done $(VENV)-airflow/.done $(CREDO)/0.5/node_modules/.installed $(CREDO)/0.6/node_modules/.installed $(IDENTUS)/node_modules/.installed  ## install ACA-Py, infinity, Airflow, Credo and the Identus SDK, in folders of their own, for tests and benchmarks

unit: $(VENV)/.test  ## run the unit tests, which need no models, Spark or other servers: make unit ARGS="-k lease"
	$(BIN)/pytest tests/unit --numprocesses $(JOBS) $(ARGS)

test: $(VENV)/.dev  ## run the tests that belong before each push, minutes: make test ARGS="-k fetch"
	$(BIN)/pytest --numprocesses $(JOBS) --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/.dev  ## run the rules on PostgreSQL, and the tests with Spark, models, full disks, lost servers, kill -9 in series, upgrades, printed pages and other clients
	-@$(MAKE) --no-print-directory --keep-going peers
	$(BIN)/pytest tests/slow --numprocesses $(SLOW_JOBS) --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev  ## lint, format, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lock: | $(VENV)/.uv  ## write the newest versions that fit into constraints.txt, which every target installs
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --no-header --no-annotate --no-emit-package agent-mediator --output-file constraints.txt pyproject.toml

newcomers:  ## play each newcomer by README's commands, on a clean machine: make newcomers ARGS=wallet
	$(PYTHON) -m tests.slow.newcomers $(ARGS)

docs: $(VENV)/.docs  ## build the documentation as a site, into build/site; a broken link is an error
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo build/site/index.html

screenshots: $(VENV)/.dev  ## take the pictures of the documentation anew, in Chromium: some minutes
	$(BIN)/python docs/pictures.py

# Measurements may run on another Python than the tests, from an environment of its own.
ifdef BENCH_PYTHON
bench:
	@$(MAKE) --no-print-directory bench BENCH_PYTHON= PYTHON=$(BENCH_PYTHON) VENV=$(VENV)-bench
else
bench: $(VENV)/.dev  ## measure beside the peers and print the headlines: make bench ARGS="--quick --write"
	$(BIN)/python -m benchmarks $(ARGS)
endif

eval: $(VENV)/.dev  ## measure how well agents are found, on the sets in EVAL_DIR: make eval ARGS="--cards 50"
	$(BIN)/python -m tests.acceptance.registry.evaluate $(FLOORS) $(ARGS)

fuzz: $(VENV)/.fuzz  ## fuzz the parsers for a minute each: make fuzz ARGS="--seconds 600"
	$(BIN)/python -m tests.fuzz $(ARGS)

pipeline-demo: $(VENV)/.pipeline  ## from nothing to a report with pictures: make pipeline-demo ARGS="--no-open"
	$(BIN)/python examples/pipeline_demo.py $(ARGS)

clean:  ## remove the environments and what the tools keep
	rm -rf build dist registry/embedding/packed mediator/console/static/lib $(VENV) $(VENV)-acapy $(VENV)-infinity $(VENV)-airflow $(VENV)-bench tests/slow/peers/node/node_modules examples/javascript/node_modules $(CREDO)/*/node_modules $(IDENTUS)/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
