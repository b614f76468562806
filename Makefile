# `make demo` and `make test` set everything up on a fresh machine; both may be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow test-zoo lint bench clean
demo: $(READY)
	$(BIN)/python benchmarks/demo.py

test: $(READY) lint
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout=3600

# Real models: an hour on two cores, and docs/zoo.md at its end.
test-zoo: $(READY)
	$(BIN)/pip install -q transformers diffusers
	$(BIN)/python benchmarks/zoo.py --jobs 2

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

# torch first and pinned: the wheel for CPUs, before anything that would pull in another build of it.
$(READY): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e ".[dev,plot,nlp]"
	touch $(READY)

clean:
	rm -rf .venv build
