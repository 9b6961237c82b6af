# `make demo` runs the pipeline on a real model; `make test` checks everything, `make quick` a subset in two minutes.
# They set up their own virtual environments; a machine needs python3 >= 3.10, pip and make.

PYTHON ?= python3
DEMO_VENV := .venv-demo
QUICK_VENV := .venv-quick
LOWEST_VENV := .venv-lowest
NEWEST_VENV := .venv-newest
TEST_VENV := .venv
CLIENTS_VENV := .venv-clients
MINUTES ?= 60
# Compiled modules are kept: the tests start a thousand processes.
export PYTHONDONTWRITEBYTECODE :=
RUFF_AND_LAYERS = $(1)/bin/ruff check . && $(1)/bin/ruff format --check . \
	&& { [ ! -e $(1)/bin/lint-imports ] || $(1)/bin/lint-imports; }

# Install in a new environment, with one rule for versions, and run all tests that need no torch.
define tested_with
	rm -rf $(2)
	$(PYTHON) -m venv $(2)
	$(2)/bin/pip install --quiet uv
	$(2)/bin/uv pip install --quiet --python $(2)/bin/python --resolution $(1) --editable '.[tests,grpc,video]'
	$(2)/bin/uv pip list --python $(2)/bin/python
	OMP_NUM_THREADS=1 $(2)/bin/python -m pytest --quick --quiet --numprocesses auto --maxprocesses 8 \
		--dist loadfile --max-worker-restart 0
endef

# Three for two cores, at most eight: a third of the time a worker waits, for a server or the disk.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); workers=$$((cores + (cores + 1) / 2)); \
	echo $$((workers < 8 ? workers : 8)))

# They count what a server does in a time, so they run after the others.
ALONE = $(addprefix tests/tools/serve/test_,clients.py load.py)

.PHONY: adversary arm bench clients gpu-proof gpu-proof-dry demo test all-types most-tests tests-alone nightly-tests quick lint \
	types quick-tests lowest newest wheel clean

demo: $(DEMO_VENV)/installed
	$(DEMO_VENV)/bin/python -m edgellm.scripts.demo

test: $(TEST_VENV)/installed
	$(call RUFF_AND_LAYERS,$(TEST_VENV))
	$(TEST_VENV)/bin/python -m edgellm.scripts.smollm2
	$(MAKE) --jobs 2 all-types tests-alone

# The type checker takes the processor time that tests leave while they wait.
all-types: $(TEST_VENV)/installed
	nice -n 19 $(TEST_VENV)/bin/pyright --pythonpath $(TEST_VENV)/bin/python

most-tests: $(TEST_VENV)/installed
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest --numprocesses $(WORKERS) \
		--dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 25 --folders -m "not nightly" \
		$(addprefix --ignore=,$(ALONE))

# Every night: the tests that take too long for each change.
nightly-tests: $(TEST_VENV)/installed
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
		--dist loadfile --max-worker-restart 0 --durations 25 -m nightly

tests-alone: most-tests
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest --durations 10 $(ALONE)

# Random attacks on everything that reads, writes or answers; the test suite has a share of them.
adversary: $(TEST_VENV)/installed
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python tests/adversary/run.py --minutes $(MINUTES)

# Minutes: the device part on aarch64, by an emulator. ARM_ROOT is a root of Debian for arm64, ONLY one of
# the steps; without them mmdebstrap makes a root, and all steps run.
arm: $(TEST_VENV)/installed
	$(TEST_VENV)/bin/python tests/arm/device_on_arm.py $(if $(ARM_ROOT),--root $(ARM_ROOT)) $(if $(ONLY),--only $(ONLY))

# Nightly: client libraries that are too heavy for the test environment, and Vercel's AI SDK with npm.
clients: $(TEST_VENV)/installed $(CLIENTS_VENV)/installed
	EDGELLM_CLIENTS_PYTHON=$(CLIENTS_VENV)/bin/python OMP_NUM_THREADS=1 \
		$(TEST_VENV)/bin/python -m pytest tests/tools/serve/test_client_libraries.py

# Without torch and its kin: the type checker takes their types as unknown, their tests are left out.
quick:
	$(MAKE) $(QUICK_VENV)/installed
	$(MAKE) --jobs 3 --output-sync=target lint quick-tests

lint: $(QUICK_VENV)/installed types
	$(call RUFF_AND_LAYERS,$(QUICK_VENV))

types: $(QUICK_VENV)/installed
	$(QUICK_VENV)/bin/pyright --project .ci/pyright-quick.json --pythonpath $(QUICK_VENV)/bin/python

quick-tests: $(QUICK_VENV)/installed
	OMP_NUM_THREADS=1 $(QUICK_VENV)/bin/python -m pytest --quick --quiet --numprocesses auto \
		--maxprocesses 8 --dist loadfile --max-worker-restart 0 --durations 5

# Every night, with PYTHON=python3.10: the lowest version of each dependency that pyproject.toml allows.
lowest:
	$(call tested_with,lowest-direct,$(LOWEST_VENV))

# Every night, with every Python there is: the newest version of each dependency.
newest:
	$(call tested_with,highest,$(NEWEST_VENV))

$(DEMO_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/pip install --quiet --upgrade pip
	$(DEMO_VENV)/bin/pip install --quiet --editable '.[export,device]'
	touch $@

$(QUICK_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(QUICK_VENV)
	$(QUICK_VENV)/bin/pip install --quiet --editable '.[quick]'
	touch $@

# torch is pinned and comes first: an open range would pull gigabytes of CUDA packages.
$(TEST_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/pip install --quiet --upgrade pip
	$(TEST_VENV)/bin/pip install --quiet torch==2.13.0
	$(TEST_VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

$(CLIENTS_VENV)/installed: tests/tools/serve/client_scripts/requirements.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install --quiet --requirement $<
	-npm install --silent --prefix $(CLIENTS_VENV) ai @ai-sdk/openai @ai-sdk/openai-compatible zod
	touch $@

# Hours: all benchmarks, their results in benchmarks/results.json, their tables in docs/benchmarks.md.
bench: $(TEST_VENV)/installed
	$(TEST_VENV)/bin/python benchmarks/run.py

# On a machine with an NVIDIA GPU, in an environment that has what docs/how-to/jetson.md installs.
gpu-proof:
	$(PYTHON) benchmarks/gpu_proof.py

# The same script on fakes, which shows that it runs; CI does so.
gpu-proof-dry: $(TEST_VENV)/installed
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python benchmarks/gpu_proof.py --dry --output $(TEST_VENV)/gpu-proof

# A wheel with compiled kernels, in dist/; `make wheel ARCH=aarch64` needs g++-aarch64-linux-gnu.
wheel:
	$(if $(ARCH),CXX=$(ARCH)-linux-gnu-g++) $(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(DEMO_VENV) $(QUICK_VENV) $(TEST_VENV) $(LOWEST_VENV) $(NEWEST_VENV) $(CLIENTS_VENV)
