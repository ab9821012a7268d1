# `make demo` and `make test` do everything on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-slow bench lint setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --retries 5 -e '.[search,test,dev]'
	touch $@

demo: setup
	$(BIN)/worldtokens demo

# Two processes with a core each: most tests wait for Python, not for arithmetic.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not network" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not network" $(ARGS)

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
