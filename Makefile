PYTHON ?= python3
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow check bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with the pinned versions (the other targets do it by themselves)

# torch goes first and by its exact version: where an index offers a CPU build of it (2.13.0+cpu), pip takes that one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"fedfit needs Python 3.10 or newer, {sys.executable} is {sys.version.split()[0]}; name another one with PYTHON=...")'
	@echo "setting up .venv (torch is large: this takes a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@.venv/bin/pip install --quiet -c constraints.txt -e '.[coordinator,images,dev]'
	@touch $@

demo: $(STAMP) ## broker, coordinator and a few devices of different sizes on this machine
	@.venv/bin/coordinator demo

check: $(STAMP) ## ruff and mypy
	@.venv/bin/ruff check .
	@.venv/bin/mypy

test: check ## check, then the tests
	@.venv/bin/python -m pytest -q -n 2 --dist loadfile

test-slow: $(STAMP) ## the tests that take minutes
	@.venv/bin/python -m pytest -q -m slow

bench: $(STAMP) ## measurements; they are no part of the tests
	@.venv/bin/python -m benchmarks
