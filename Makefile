# Everything a fresh machine needs is set up on the way: `make demo`, `make test`.
#   make demo            a few clients read stories from a server, then every phase gets the same work: one table
#   make test            the ordinary test suite
#   make test-slow       the suites that take longer
#   make test-clients    real clients against every server; installs them into .clients/ (from pip's index, and npm's)
#   make serve PHASE=5   serve one phase, by number or name (ARGS="--model dummy:llama-60m --port 8000" adds options)
#   make cluster PHASE=8 two replicas behind one address, on Ray (ARGS="--replicas 4" adds options)
#   make test-cluster    the tests of that
#   make learn PHASE=6   copy a phase without the bodies that are its idea into learn/, to write them
#   make check PHASE=6   what holds of the copy, by the phase's own tests
#   make lint            style, types, and the one-way dependency rule
#   make bench           a quick comparison of all phases (minutes); results go to benchmarks/results/local
#   make plots           draw every figure of the site from benchmarks/results
#   make docs            build the site into site/
#   make clean           remove what was built; `make distclean` the environments, too; measurements stay
# PIP_ARGS goes to pip, for example to name an index that has a CPU build of torch.

PYTHON ?= python3
PHASE ?= 5
ARGS ?=
PIP_ARGS ?=

BIN := .venv/bin

# What figures are drawn from (folders change when a result is taken away), and the file that is written last.
PLOTTED := $(shell find benchmarks/results) $(wildcard benchmarks/plots/*.py) benchmarks/report.py benchmarks/results.py
CAPTIONS := docs/assets/plots/captions.json

.PHONY: demo serve cluster learn check test test-slow test-browser test-clients test-cluster lint format bench plots docs docs-serve clean distclean

# Two stamps: serving needs a few packages, testing many.
.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt -e .
	$(BIN)/python -m kernels.native
	touch $@

.venv/full: .venv/base
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev,docs]'
	touch $@

.venv/cluster: .venv/base
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[cluster]'
	touch $@

demo: .venv/base
	$(BIN)/python -m benchmarks.demo

serve: .venv/base
	$(BIN)/python -m infer serve '$(PHASE)' $(ARGS)

cluster: .venv/cluster
	$(BIN)/python -m cluster --phase '$(PHASE)' $(ARGS)

# One thread a test worker: two workers that both want two cores wait for each other.
test: .venv/full
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-slow: .venv/full
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'slow and not gpu and not browser and not checkpoints and not cluster'
	INFER_NATIVE_KERNELS=false OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/identity tests/common/test_models.py -m 'not gpu and not checkpoints'

# Needs chromium on the machine.
test-browser: .venv/full
	$(BIN)/pytest -m browser

# One after the other: each starts a cluster. The first are asked of one that stands all the while, the others not beside it.
test-cluster: .venv/full .venv/cluster
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/cluster/api tests/cluster/test_cluster.py -m 'cluster and not slow'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/cluster --ignore tests/cluster/api --ignore tests/cluster/test_cluster.py -m 'cluster and not slow'

# A client that cannot be installed is skipped. TABLE=benchmarks/results writes what the site shows.
test-clients: .venv/full
	OMP_NUM_THREADS=1 PIP_ARGS='$(PIP_ARGS)' $(BIN)/pytest tests/clients -m clients -rs $(if $(TABLE),--clients-table=$(TABLE))

learn: .venv/full
	@$(BIN)/python -m tutor learn '$(PHASE)'

check: .venv/full
	@$(BIN)/python -m tutor check '$(PHASE)'

bench: .venv/full
	$(BIN)/python -m benchmarks compare --quick --workload mixed,continuous_batching

plots: $(CAPTIONS)

$(CAPTIONS): $(PLOTTED) | .venv/full
	$(BIN)/python -m benchmarks plots

lint: .venv/full
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/full
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: plots
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: plots
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# benchmarks/results/local stays: nobody can build a measurement again.
clean:
	rm -rf site build *.egg-info docs/assets/plots
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis
	find . -name .venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .clients
