# make demo   install into .venv, fetch the default model once, answer one prompt, print what it cost
# make test   everything that CI runs: lint, types, tests
# make sanitize  the kernels' tests under address and undefined-behaviour sanitizers
# make mcp-conformance  the protocol's own suite against heedful's MCP server and client (brings Node.js where there is none)
# make browser   Debian's Chromium, which the tests of the server's page drive (as root)
# make train-demo  trains a small model on a part of Moby-Dick and runs it: under 5 minutes on two cores
# make lora-demo  teaches SmolLM2 a format with low-rank updates and judges it: six minutes of processor time
# make decider  trains the decider that comes with heedful and judges it: under an hour on two cores
# make dev    an editable install for working on heedful

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.heedful-installed
TORCH_INSTALLED := $(VENV)/.heedful-torch-installed
TEST_INSTALLED := $(VENV)/.heedful-test-installed
SOURCES := pyproject.toml CMakeLists.txt $(shell find src -type f -not -name '*.pyc')

.PHONY: demo train-demo lora-demo test lint types sanitize mcp-conformance browser decider dev clean

demo: $(INSTALLED)
	$(BIN)/heedful pull
	$(BIN)/heedful generate --chat --receipt --max-tokens 80 "Why is the sky blue? Answer in one sentence."

train-demo: $(TORCH_INSTALLED)
	rm -rf runs/demo
	$(BIN)/heedful train --config examples/demo.toml --data examples/moby_dick.txt --out runs/demo
	$(BIN)/heedful runs runs/demo --html --open
	$(BIN)/heedful generate -m runs/demo --receipt --max-tokens 80 "The whale"

lora-demo: $(TORCH_INSTALLED)
	rm -rf runs/lora_demo
	$(BIN)/python recipes/lora_demo/rows.py runs/lora_demo_rows
	$(BIN)/heedful train --config recipes/lora_demo/lora.toml --chat runs/lora_demo_rows/train.jsonl --out runs/lora_demo
	$(BIN)/python recipes/lora_demo/judge.py runs/lora_demo runs/lora_demo_rows/held_out.jsonl

test: lint types
	$(BIN)/python -m pytest

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TEST_INSTALLED)
	$(BIN)/mypy

$(INSTALLED): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet .
	touch $@

$(TORCH_INSTALLED): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet '.[torch]'
	touch $(INSTALLED) $@

$(TEST_INSTALLED): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet '.[test]'
	touch $(INSTALLED) $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || (echo "python3 cannot make a virtual environment: install python3-venv"; exit 1)

sanitize: $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet '.[dev]'
	$(BIN)/cmake -S . -B build/sanitize -DHEEDFUL_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build build/sanitize --parallel 2
	rm -rf build/sanitize/site && mkdir -p build/sanitize/site
	cp -r src/heedful build/sanitize/site/ && cp build/sanitize/_native*.so build/sanitize/site/heedful/
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/site $(BIN)/python -m pytest -p no:cacheprovider \
	  tests/kernels tests/engine/test_native_runner.py tests/engine/test_native_policies.py tests/engine/test_native_selection.py \
	  tests/engine/test_native_encoder.py \
	  -k "not real and not golden_passage and not margin and not misuse and not built_in"

mcp-conformance: $(TEST_INSTALLED)
	$(BIN)/python tests/mcp/conformance/run.py build/mcp-conformance

browser:
	(command -v chromium && command -v chromedriver) >/dev/null || \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null)

# two processes of one thread each: on busy cores faster than two threads that wait for each other
DECIDER_PRECISION = $(shell grep -qs avx512_bf16 /proc/cpuinfo && echo bf16 || echo f32)
DECIDER_TRAIN = $(BIN)/torchrun --nproc-per-node 2 -m heedful.train --set optim.precision=$(DECIDER_PRECISION)

decider: $(TEST_INSTALLED)
	$(BIN)/python -m recipes.decider.data
	$(BIN)/python -m recipes.decider.baselines
	$(BIN)/python -m recipes.decider.drawn
	rm -rf build/decider/runs
	for loss in ce rlcd; do \
	  $(DECIDER_TRAIN) --config recipes/decider/first.toml --decisions build/decider/drawn/short.jsonl --steps 100 \
	    --set optim.schedule_steps=100 --set decide.loss=$$loss --out build/decider/runs/$${loss}_short && \
	  $(BIN)/python -m recipes.decider.checkpoint build/decider/$${loss}_short build/decider/runs/$${loss}_short || exit 1; \
	done
	$(DECIDER_TRAIN) --config recipes/decider/first.toml --out build/decider/runs/first
	$(DECIDER_TRAIN) --config recipes/decider/cool.toml --out build/decider/runs/cool
	$(DECIDER_TRAIN) --config recipes/decider/again.toml --out build/decider/runs/again
	$(BIN)/python -m recipes.decider.checkpoint build/decider/model \
	  build/decider/runs/first build/decider/runs/cool build/decider/runs/again
	$(BIN)/python -m recipes.decider.evaluate build/decider/model recipes/decider/results.json \
	  --beside build/decider/ce_short build/decider/rlcd_short
	$(BIN)/python -m recipes.decider.ship build/decider/model recipes/decider/results.json

dev: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'

clean:
	rm -rf $(VENV) build dist
