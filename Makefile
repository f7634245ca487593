# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.made
DOCS_STAMP := $(VENV)/.docs
SITE := build/docs/html
WORKERS ?= 4
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

unexport PYTHONDONTWRITEBYTECODE  # else every process of every run compiles all of paceline

.PHONY: demo check test lint types soak bench docs clean

$(STAMP): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[digits,hf,tensorboard,s3,test,lint]'
	@touch $@

demo: $(STAMP)
	@rm -rf .demo && mkdir .demo
	@cd .demo && PATH="$(CURDIR)/$(BIN):$$PATH" sh ../examples/demo.sh

# What to run before a commit: style, types, and the tests that start no run.
check: lint types
	@$(BIN)/python -m pytest -m quick -q -n 2 --dist loadfile

# Most tests wait for processes more than they compute, so there are more workers than cores. Tests that look at the
# clock run after them, alone.
test: $(STAMP)
	@$(BIN)/python -m pytest -m "not soak and not gpu and not clock" -q -n $(WORKERS) --dist loadgroup --durations 40 || code=$$?; \
	$(BIN)/python -m pytest -m "clock and not soak and not gpu" -q -n 0 || code=$$?; exit $${code:-0}

soak: $(STAMP)
	@$(BIN)/python -m pytest -m soak -q

lint: $(STAMP)
	@$(BIN)/ruff check src tests examples benchmarks docs/conf.py docs/sphinx_ext docs/pictures
	@$(BIN)/ruff format --check src tests examples benchmarks docs/conf.py docs/sphinx_ext docs/pictures

types: $(STAMP)
	@$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/exact.py

# Sphinx and its parts are installed only here. Warnings are errors: a broken link or a docstring that can't be read.
$(DOCS_STAMP): $(STAMP) constraints.txt pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs $(SITE)
	@echo "$(SITE)/index.html"

clean:
	rm -rf $(VENV) .demo build/docs
