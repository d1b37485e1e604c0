PYTHON ?= python3
ACCELERATOR ?= cuda:0
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
BROWSER_STAMP := .venv/.installed-browser
PIP := .venv/bin/python -m pip install --quiet --retries 10 --timeout 60 -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install browser demo test test-gpu test-slow check bench docs

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with the pinned versions (the other targets do it by themselves)

# torch goes first and by its exact version: where an index offers a CPU build of it (2.13.0+cpu), pip takes that one.
# What was cut short goes on; a .venv whose Python or pip does not run is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"fedfit needs Python 3.10 or newer, {sys.executable} is {sys.version.split()[0]}; name another one with PYTHON=...")'
	@echo "setting up .venv (torch is large: this takes a few minutes the first time)"
	@$(PYTHON) -m venv $$(.venv/bin/python -m pip --version >/dev/null 2>&1 || echo --clear) .venv
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e '.[coordinator,images,dev]'
	@touch $@

# The tools of `make docs`, which nothing else needs.
$(DOCS_STAMP): $(STAMP)
	@$(PIP) -e '.[docs]'
	@touch $@

# What drives Chromium in the tests of the live page, and makes the pictures of the docs; nothing else needs it.
$(BROWSER_STAMP): $(STAMP)
	@$(PIP) -e '.[browser]'
	@touch $@

browser: $(BROWSER_STAMP) ## set up what drives Chromium in tests/browser (Chromium itself: apt-get install chromium)

demo: $(STAMP) ## broker, coordinator and a few devices of different sizes on this machine
	@.venv/bin/coordinator demo

check: $(STAMP) ## ruff (rules, format) and mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet . || { echo "make check: .venv/bin/ruff format . puts this right" >&2; exit 1; }
	@.venv/bin/mypy

# Four processes on two cores: most tests wait for others. Files begin in the order of their names, the long ones of
# tests/integration before the many short ones; xdist alone would leave those with the fewest tests, the longest, for the
# end. With bytecode, whatever the environment says: hundreds of Python processes start.
test: check ## check, then the tests
	@PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) ## the tests that take minutes
	@.venv/bin/python -m pytest -q -m slow

# The tests of accelerators on a real one, with this machine's own torch if .venv has been made of it; one process: two
# would share the memory.
test-gpu: $(STAMP) ## the tests of accelerators on this machine's GPU (ACCELERATOR=cuda:0)
	@FEDFIT_TEST_ACCELERATOR=$(ACCELERATOR) .venv/bin/python -m pytest -q -rs -m accelerator

bench: $(STAMP) ## measurements; they are no part of the tests
	@.venv/bin/python -m benchmarks

# Strict: a warning, such as a dead link, is an error. The variable silences an announcement of the theme's authors.
docs: $(DOCS_STAMP) ## the documentation as a site, in site/; open site/index.html
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict --clean
