# `make demo` and `make test` do everything on a fresh machine.
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-slow bench lint types setup clean

setup: $(VENV)/.ready

# pip shows its progress on a terminal and is quiet in a log.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing worldtokens and its dependencies into $(VENV): several minutes the first time"
	$(BIN)/python -m pip install --disable-pip-version-check $$([ -t 1 ] || echo --quiet) --retries 5 -e '.[search,test,dev]'
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

lint: setup types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The public modules, as a user's type checker sees them (py.typed).
types: setup
	$(BIN)/python scripts/check_types.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
