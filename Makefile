# make demo   install into .venv, fetch the default model once, answer one prompt, print what it cost
# make test   everything that CI runs: lint, types, tests
# make dev    an editable install for working on heedful

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.heedful-installed
TEST_INSTALLED := $(VENV)/.heedful-test-installed
SOURCES := pyproject.toml CMakeLists.txt $(shell find src -type f -not -name '*.pyc')

.PHONY: demo test lint types dev clean

demo: $(INSTALLED)
	$(BIN)/heedful pull
	$(BIN)/heedful generate --chat --receipt --max-tokens 80 "Why is the sky blue? Answer in one sentence."

test: lint types
	$(BIN)/python -m pytest

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TEST_INSTALLED)
	$(BIN)/mypy

$(INSTALLED): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || (echo "python3 cannot make a virtual environment: install python3-venv"; exit 1)
	$(BIN)/python -m pip install --quiet .
	touch $@

$(TEST_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet '.[test]'
	touch $@

dev:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'

clean:
	rm -rf $(VENV) build dist
