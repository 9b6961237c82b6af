# `make demo` runs the pipeline on a real model; `make test` checks everything.
# Both set up their own virtual environments; a machine needs python3 >= 3.10, pip and make.

PYTHON ?= python3
DEMO_VENV := .venv-demo
TEST_VENV := .venv

.PHONY: demo test lint clean

demo: $(DEMO_VENV)/installed
	$(DEMO_VENV)/bin/python -m edgellm.scripts.demo

# The server's tests run alone: they count what it does in a time.
test: lint
	$(TEST_VENV)/bin/python -m edgellm.scripts.smollm2
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
		--dist loadfile --no-loadscope-reorder --durations 25 --ignore tests/tools/serve
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest --durations 10 tests/tools/serve

lint: $(TEST_VENV)/installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/pyright --pythonpath $(TEST_VENV)/bin/python
	$(TEST_VENV)/bin/lint-imports

$(DEMO_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/pip install --quiet --upgrade pip
	$(DEMO_VENV)/bin/pip install --quiet --editable '.[export,device]'
	touch $@

# torch is pinned and comes first: an open range would pull gigabytes of CUDA packages.
$(TEST_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/pip install --quiet --upgrade pip
	$(TEST_VENV)/bin/pip install --quiet torch==2.13.0
	$(TEST_VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(DEMO_VENV) $(TEST_VENV)
