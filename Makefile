# Two commands do everything on a machine that has only Python: `make demo` and `make test`.
# Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv$(shell $(PYTHON) -c 'import sys; v = sys.version_info[:2]; print("" if v == (3, 11) else "-%d.%d" % v)')
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DEMO = $(VENV)/.installed-demo
PIP = $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo test test-all lint format clean

demo: $(DEMO)
	rm -rf runs/demo
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=runs/demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 2 --dist loadfile; tests=$$?; \
	wait $$types && exit $$tests

test-all: $(STAMP)
	$(PIP) --quiet --editable '.[dev,torch,zoo]'
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ""

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DEMO): pyproject.toml  # only what the demo needs: a minute or two, most of it for JAX
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train]'
	touch $@

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@ $(DEMO)

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
