# `make demo` and `make test` set everything up on a fresh machine; both can be rerun at any time.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Two workers of pytest with two threads each on two cores: threads that wait must sleep, not spin.
test test-cores test-slow test-faults: export OMP_WAIT_POLICY := passive

.PHONY: demo test test-cores test-slow test-faults test-zoo test-versions dist lint clean
demo: $(READY)
	$(BIN)/python benchmarks/demo.py

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(MAKE) test-cores

# A few tests of kernels and of the contract on the cores that this machine would not choose: a process per core, two at a
# time, since starting workers for each would take longer than the tests.
CORES_QUICK := tests/kernels/test_core.py tests/kernels/test_bitmask.py tests/kernels/test_norm.py \
  tests/kernels/test_gradients.py tests/kernels/test_linear.py tests/contract/test_exactness.py
CORES := "generic $(CORES_QUICK)" "torch $(CORES_QUICK)" $(if $(filter x86_64,$(shell uname -m)),"lanes16 tests/kernels")
test-cores: $(READY)
	$(BIN)/python -m pytest -n 2 -rs -m slow tests/kernels/test_cross_compile.py
	printf '%s\n' $(CORES) | xargs -P 2 -L 1 sh -c 'SHOESTRING_CORE=$$0 $(BIN)/python -m pytest "$$@" \
	  -k "not contract or mlp or wrn-no-bn or wrn-nonzero or wrn-everything"'

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout=3600

# Kills, faults, flips and fuzzing with the full numbers: hours on two cores, and docs/reliability.md at its end.
# SHARE=0.1 takes a tenth of each; short forms of all are in `make test`.
SHARE ?= 1
test-faults: $(READY)
	$(BIN)/python tests/faults/run.py --share $(SHARE) --write docs/reliability.md

# Real models: an hour on two cores, and docs/zoo.md at its end.
test-zoo: $(READY)
	$(BIN)/pip install -q transformers diffusers
	$(BIN)/python benchmarks/zoo.py --jobs 2

# A quick set on the oldest and the newest PyTorch that pyproject.toml declares (4 GB each where they come with CUDA), with
# the Pythons that `make test` does not have; where such a Python is missing, with the one that there is.
VERSIONS := python3.12:2.8.0 python3.13:2.15.0
QUICK := tests/measuring tests/profiling/test_limits.py tests/profiling/test_values.py tests/profiling/test_unharmed.py \
  tests/profiling/test_as_measured.py tests/kernels/test_norm.py tests/techniques/test_regions.py \
  tests/techniques/test_checkpoint.py tests/techniques/test_microbatch.py
test-versions:
	for version in $(VERSIONS); do \
	  python=$${version%:*}; torch=$${version#*:}; here=.venv/torch-$$torch; \
	  $$python --version >/dev/null 2>&1 || python=$(PYTHON); \
	  test -x $$here/bin/python || $$python -m venv $$here || exit 1; \
	  $$here/bin/pip install -q torch==$$torch || exit 1; \
	  $$here/bin/pip install -q -C build-dir=build/torch-$$torch ".[dev]" || exit 1; \
	  $$here/bin/python -m pytest $(QUICK) || exit 1; \
	done

# A wheel and an sdist in dist/, each installed into a new environment, where the doctor trains a tiny model.
dist: $(READY)
	rm -rf dist
	$(BIN)/pip install -q build
	$(BIN)/python -m build --outdir dist .
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf build/clean && $(PYTHON) -m venv build/clean || exit 1; \
	  build/clean/bin/pip install -q torch==2.13.0 || exit 1; \
	  build/clean/bin/pip install -q "$$file" || exit 1; \
	  (cd build && clean/bin/shoestring doctor && clean/bin/shoestring plan wrn-10-1 --batch 10 --budget 60%) || exit 1; \
	done

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check -q src tests benchmarks examples docs
	$(BIN)/mypy

# torch first and pinned: the wheel for CPUs, before anything that would pull in another build of it.
$(READY): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e ".[dev,plot,nlp,integrations]"
	touch $(READY)

clean:
	rm -rf .venv build dist
