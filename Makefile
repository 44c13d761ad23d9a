# Everything here sets itself up: on a machine with Python 3.11 and make, `make demo` and `make test` are the first
# commands to type. ARGS reaches the command behind a target: make demo ARGS="--seconds 20", make test ARGS="-k
# registry". PYTHON names the interpreter to use.

PYTHON ?=
ARGS ?=

# The stamps' names tell the folder and the interpreter that .venv was made for; scripts/setup says why.
MADE_FOR := $(shell printf '%s' '$(CURDIR) $(PYTHON)' | cksum | cut -d ' ' -f 1)
STAMP := .venv/.made-$(MADE_FOR)
RUN := $(STAMP)-run
DEV := $(STAMP)-dev
INPUTS := constraints.txt pyproject.toml $(wildcard plugins/*/pyproject.toml) scripts/setup

BIN := .venv/bin
CHECKS := check-style check-format check-types check-imports check-spelling check-generated

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick soak bench lint format generate picture apiserver dist clean $(CHECKS)
.NOTPARALLEL:

help:
	@echo 'make demo      a hub and three clusters on this machine, with load that moves'
	@echo 'make test      the whole test suite'
	@echo 'make quick     the same without what takes seconds, for after every change'
	@echo 'make lint      style, types, import rules, spelling, generated code and documents'
	@echo 'make soak      the tests that repeat for minutes'
	@echo 'make bench     the benchmarks'
	@echo 'make format    puts the code into its format'
	@echo 'make generate  regenerates trio_federation/pb from proto/, and documents from the code'
	@echo 'make picture   makes the picture of the README anew, from a run of the demo'
	@echo 'make apiserver builds the Kubernetes API server that tests run against, once; needs Go'
	@echo 'make dist      wheels and source distributions in dist/, built twice and compared'
	@echo 'make clean     removes .venv, caches and builds'

$(RUN): $(INPUTS)
	@PYTHON='$(PYTHON)' STAMP='$(STAMP)' scripts/setup
	@touch $@

$(DEV): $(INPUTS)
	@PYTHON='$(PYTHON)' STAMP='$(STAMP)' scripts/setup dev
	@touch $(RUN) $@

setup: $(DEV)
	@:

demo: $(RUN)
	@$(BIN)/trio-federation demo $(ARGS)

# All of it as two runs side by side; what ARGS asks for as one.
test: $(DEV)
	@$(BIN)/python $(if $(strip $(ARGS)),-m pytest $(ARGS),scripts/run_tests.py)

# What starts processes, builds or repeats is left out; `make test` and CI run all of it.
quick: $(DEV)
	@$(BIN)/python -m pytest -m 'not slow and not soak' $(ARGS)

# Random inputs anew each time, and more of them.
soak: $(DEV)
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak $(ARGS)

bench: $(DEV)
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(CHECKS)

check-style: $(DEV)
	@$(BIN)/ruff check --quiet

check-format: $(DEV)
	@$(BIN)/ruff format --check --quiet || \
		{ $(BIN)/ruff format --diff; echo 'not in the format of ruff: run `make format`' >&2; exit 1; }

check-types: $(DEV)
	@$(BIN)/mypy --no-error-summary

check-imports: $(DEV)
	@$(BIN)/lint-imports --no-logo

check-spelling: $(DEV)
	@$(BIN)/codespell

check-generated: $(DEV)
	@$(BIN)/python scripts/generate.py --check
	@$(BIN)/python scripts/generate_docs.py --check

format: $(DEV)
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format --quiet

generate: $(DEV)
	@$(BIN)/python scripts/generate.py
	@$(BIN)/python scripts/generate_docs.py

picture: $(DEV)
	@$(BIN)/python scripts/picture.py $(ARGS)

# Into a cache outside of this folder. `make test` does it by itself, and skips those tests where there is no Go.
apiserver: $(DEV)
	@$(BIN)/python -m tests.apiserver.build $(ARGS)

dist: $(DEV)
	@$(BIN)/python scripts/package.py $(ARGS)

clean:
	rm -rf .venv dist plugins/*/dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
