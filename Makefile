# make figure1   the paper's Figure 1, from nothing        make test    lint, types, tests
# make bench     what measuring costs, as ratios           make clean   remove the environment and caches (never runs/)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install figure1 test lint types bench clean

help:
	@sed -n '1,2s/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whybn needs Python 3.11 or newer, this is " + sys.version)'
	@echo "installing into $(VENV): a few minutes, and up to 2 GB on disk, most of it torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

figure1: $(STAMP)
	$(BIN)/whybn figure1 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -n 2 $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
