# Everything a fresh machine needs is set up on the way: `make demo`, `make test`.
#   make demo            a few clients read stories from a server, then every phase gets the same work: one table
#   make demo MODEL=smollm2   the same with a real chat model, which is downloaded first (93 MB)
#   make serve           serve phase 9: chat with it in a browser (PHASE=5, ARGS="--model dummy:llama-60m --port 8000")
#   make bench           a quick comparison of all phases (minutes); results go to benchmarks/results/local
#   make gpu OUT=DIR     everything that waits for a GPU: tests, then measurements; installs nothing (PYTHON=python3
#                        names an interpreter); `make gpu-attention OUT=DIR` runs one part
#   make test            the ordinary test suite (ARGS=--order-seed=5 runs it in a random order)
#   make test-slow       the tests that take longer
#   make test-forms      ordinary tests without native kernels
#   make test-browser    the server's page and the site in chromium, which must be on the machine
#   make test-clients    real clients against every server; installs them into .clients/ (from pip's index, and npm's)
#   make test-checkpoints   real models against transformers; downloads them (330 MB) to the user's cache folder
#   make cluster PHASE=8 two replicas behind one address, on Ray (ARGS="--replicas 4" adds options)
#   make test-cluster    the tests of that
#   make learn PHASE=6   copy a phase without the bodies that are its idea into learn/, to write them
#   make check PHASE=6   what holds of the copy, by the phase's own tests: file, line, expected and got
#   make serve LEARN=6   serve the copy; its log names the line of the copy that raises
#   make compare LEARN=6 measure the copy beside the phase itself, in one table
#   make step LEARN=6    draw the copy's steps beside those of any phase, in a page to open
#   make size            lines of each part, and the functions that a decode step crosses
#   make lint            style, types, and the one-way imports within the server
#   make wheel           build the sdist and the wheel into dist/
#   make test-wheel      install the wheel into an empty environment outside of the tree, and use it there
#   make test-pythons    the ordinary test suite on Python 3.11, 3.12 and 3.13, those that are on the machine
#   make test-lowest     the same suite with the lowest versions of packages that pyproject.toml allows
#   make plots           draw every figure of the site from benchmarks/results
#   make docs            build the site into site/ (SITE_URL=https://… if it is published: link previews need it)
#   make docs-version    build the site of this version into the local branch `docs-site`, beside the versions there
#   make docs-serve      build the site and serve it at http://127.0.0.1:8000
#   make clean           remove what was built; `make distclean` the environments, too; measurements stay
# PIP_ARGS goes to pip. Without it, and without an NVIDIA driver on the machine, the CPU build of torch is taken from
# pytorch's index (TORCH_CPU_INDEX) if that can be reached: about 1 GB installed instead of several.

PYTHON ?= python3
PHASE ?= 9
LEARN ?=
ARGS ?=
MODEL ?=
PIP_ARGS ?=

# Tests and demo start hundreds of processes. Each starts 0.3 s sooner if Python keeps the compiled modules.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
NEW_ENOUGH = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
# Python compiles a module when it is first imported. pip would compile thousands that are never used.
INSTALL = $(BIN)/pip install --quiet --no-compile $(PIP_ARGS)
# Without --quiet, pip draws a bar for each download, if somebody watches.
SHOWN_INSTALL = $(BIN)/pip install $$(test -t 2 || echo --quiet) --no-compile $(PIP_ARGS)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NVIDIA_DRIVER ?= $(wildcard /proc/driver/nvidia/version)
# Asked once: pip would try an index that cannot be reached again and again, for every package.
REACHED = import urllib.request; urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)
CPU_BUILD = $(if $(PIP_ARGS)$(NVIDIA_DRIVER),,$(shell $(PYTHON) -c '$(REACHED)' 2>/dev/null && echo --extra-index-url $(TORCH_CPU_INDEX)))
# The interpreter of `make gpu`: the one that was named, else the environment's where it exists.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))

# What figures are drawn from (folders change when a result is taken away), and the file that is written last.
PLOTTED := $(shell find benchmarks/results) $(wildcard benchmarks/plots/*.py) benchmarks/report.py benchmarks/results.py
CAPTIONS := docs/assets/plots/captions.json

.PHONY: help gpu demo serve compare cluster learn check step test test-slow test-forms test-browser test-clients
.PHONY: test-checkpoints test-cluster lint size format bench plots wheel test-wheel test-pythons test-lowest docs
.PHONY: docs-version docs-serve clean distclean gpu-tests gpu-attention gpu-offline gpu-servers

# Prints the comment at the top of this file.
help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

# Two stamps: serving needs a few packages, testing many.
#
# The kernels need torch alone (and torch numpy), so they are built while the other packages are installed. The project
# is installed with setuptools, which torch needs, too: an isolated build would download another.
#
# An environment without pip is what is left where venv lacks ensurepip (Debian without python3-venv).
.venv/base: pyproject.toml constraints.txt
	@test -x $(BIN)/pip && $(BIN)/python $(NEW_ENOUGH) || $(PYTHON) $(NEW_ENOUGH) || \
		{ echo "This needs Python 3.11 or newer, and $(PYTHON) is none: name another, as in make PYTHON=python3.12"; exit 1; }
	@echo "Installing torch, the server's packages and a C++ build of its kernels into .venv. With a CPU build of torch"
	@echo "this is about 1 GB on disk, with a CUDA build several GB. It takes minutes, most of them for the download."
	test -x $(BIN)/pip && $(BIN)/python $(NEW_ENOUGH) || $(PYTHON) -m venv --clear .venv
	@echo "1 of 2: torch"
	$(SHOWN_INSTALL) $(CPU_BUILD) -c constraints.txt torch numpy 'setuptools>=77'
	@echo "2 of 2: the other packages, and the kernels beside them"
	$(BIN)/python -m kernels.native & \
	$(INSTALL) $(CPU_BUILD) -c constraints.txt --no-build-isolation -e . && wait $$!
	touch $@

.venv/full: .venv/base
	@echo "Installing packages for tests, lint and the site into .venv: about 2 GB more, minutes more."
	$(INSTALL) -c constraints.txt -e '.[dev,docs]'
	touch $@

.venv/cluster: .venv/base
	@echo "Installing Ray into .venv: about 300 MB more."
	$(INSTALL) -c constraints.txt -e '.[cluster]'
	touch $@

.venv/release: .venv/base
	$(INSTALL) -c constraints.txt -e '.[release]'
	touch $@

demo: .venv/base
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python -m infer demo $(if $(MODEL),--model '$(MODEL)')

serve: .venv/base
	$(BIN)/python -m $(if $(LEARN),tutor serve '$(LEARN)',infer serve '$(PHASE)') $(ARGS)

# ARGS are those of `infer compare`: without LEARN every phase is measured, or those that ARGS="--phases 5,9" names.
compare: .venv/full
	$(BIN)/python -m $(if $(LEARN),tutor compare '$(LEARN)',infer compare) $(ARGS)

cluster: .venv/cluster
	$(BIN)/python -m cluster --phase '$(PHASE)' $(ARGS)

# One thread a test worker: workers that want all cores wait for each other. Three, as tests also wait for servers.
test: .venv/full
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal $(ARGS)

test-slow: .venv/full plots
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m 'slow and not gpu and not browser and not checkpoints and not cluster' $(ARGS)

# As on a machine without a compiler: what the ordinary suite asks of models, of the torch references.
test-forms: .venv/full
	INFER_NATIVE_KERNELS=false OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/identity/test_token_identity.py tests/common/test_models.py

# Needs chromium on the machine. Only modules with such tests are imported, which otherwise takes longer than some tests.
test-browser: .venv/full plots
	$(BIN)/pytest -n 2 --dist loadfile -m browser $$(grep -rl 'mark\.browser' tests)

# One after the other: each starts a cluster. The first are asked of one that stands all the while, the others not beside it.
test-cluster: .venv/full .venv/cluster
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/cluster/api tests/cluster/test_cluster.py -m 'cluster and not slow'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/cluster --ignore tests/cluster/api --ignore tests/cluster/test_cluster.py -m 'cluster and not slow'

# A client that cannot be installed is skipped. TABLE=benchmarks/results writes what the site shows. No mark is left
# out: openai for Python is among the project's packages, and its tests are in the other suites, too.
test-clients: .venv/full
	OMP_NUM_THREADS=1 PIP_ARGS='$(PIP_ARGS)' $(BIN)/pytest tests/clients -m '' -rs $(if $(TABLE),--clients-table=$(TABLE))

# A model that cannot be downloaded is skipped, with the reason. One worker a model.
test-checkpoints: .venv/full
	OMP_NUM_THREADS=1 PIP_ARGS='$(PIP_ARGS)' $(BIN)/pytest -n 2 --dist loadgroup -m checkpoints -rs tests/checkpoints tests/common/test_models.py $(ARGS)

learn: .venv/full
	@$(BIN)/python -m tutor learn '$(PHASE)'

# Exit code 1 says that something does not hold yet: the report said so, and make need not call it an error.
check: .venv/full
	@$(BIN)/python -m tutor check '$(PHASE)' || test $$? -eq 1

step: .venv/full
	@$(BIN)/python -m tutor step '$(LEARN)'

bench: .venv/full
	$(BIN)/python -m benchmarks compare --quick --workload mixed,continuous_batching

# Needs no installation: on a borrowed machine nothing can be downloaded. If a part fails or takes too long, the others
# run all the same. Tables are written row by row. Most tests wait for a compiler: with pytest-xdist, ARGS="-n 8".
GPU = timeout 480 $(GPU_PYTHON) -m
GPU_PARTS := tests steps-llama-3.2-1b attention offline servers steps-qwen3-0.6b steps-llama-3.2-3b
gpu:
	@test -n '$(OUT)' || { echo "make gpu OUT=DIR: name a folder for results"; exit 2; }
	@$(MAKE) --keep-going --no-print-directory $(GPU_PARTS:%=gpu-%)
gpu-tests:
	$(GPU) pytest -m gpu --continue-on-collection-errors $(ARGS)
gpu-steps-%:
	$(GPU) benchmarks micro gpu_steps --model 'dummy:$*' --out '$(OUT)'
gpu-attention gpu-offline: gpu-%:
	$(GPU) benchmarks micro $(subst attention,gpu_attention,$*) --out '$(OUT)'
gpu-servers:
	$(GPU) benchmarks compare --model dummy:llama-3.2-1b --workload mixed --repeats 1 --rate table --out '$(OUT)'

plots: $(CAPTIONS)

$(CAPTIONS): $(PLOTTED) | .venv/full
	$(BIN)/python -m benchmarks plots

lint: .venv/full
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

size: .venv/base
	$(BIN)/python .ci/size.py

format: .venv/full
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

wheel: .venv/release
	rm -rf dist
	$(BIN)/python -m build --quiet

test-wheel: wheel
	$(BIN)/twine check --strict dist/*
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python .ci/test_wheel.py dist/*.whl

test-pythons: .venv/release
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/nox -s tests -- $(ARGS)

test-lowest: .venv/release
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/nox -s lowest -- $(ARGS)

docs: plots
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Nothing is pushed. To look at it: `.venv/bin/mike serve --branch docs-site`. The switch between versions needs a server.
docs-version: plots .venv/release
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --branch docs-site --update-aliases "$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" latest
	$(BIN)/mike set-default --branch docs-site latest

docs-serve: plots
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# benchmarks/results/local stays: nobody can build a measurement again.
clean:
	rm -rf site build dist *.egg-info docs/assets/plots
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis
	find . -name .venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .clients .nox
