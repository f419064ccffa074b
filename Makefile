# The verbs of loraplex. CI calls the same ones.
#
#   make demo    set up, serve the shipped tiny model, run the founding example
#   make test    set up, run the tests (no GPU, no network but loopback)
#   make test-busy  the same beside four busy processes; BUSY_TESTS="PATH ..." takes a part
#   make coverage   what of src the tests of `make test` run, by package
#   make lint    format check, lint, import contracts, language, budget of code
#   make types   mypy --strict
#   make test-all     all tests that need neither a GPU nor a browser; CI takes a third of the slow ones
#   make test-lowest  a part of the tests with the lowest versions that pyproject.toml allows
#   make test-browser the console and the documentation's site in a real browser (Chromium);
#                BUSY=.ci/busy beside busy processes
#   make screenshots  the pictures of docs/console.md
#   make vendor  bundle the console's libraries from npm's registry again
#   make ray-test     replicas on a Ray cluster of two nodes on this machine, with faults
#   make soak    what takes too long for CI: long schedules, kills, many more examples
#   make originals ORIGINALS=FOLDER   the programs of the TensorRT-LLM backend's checkouts in a folder
#   make charts  check the Helm chart and the other objects of deploy/ without a cluster
#   make lock    write constraints.txt anew; LOCK_ARGS=--upgrade takes the newest versions
#   make bench   measure a server on this machine, and compare it with BENCH_PEERS
#   make docs    build the documentation, with docs/openapi.json; needs neither torch nor a compiler
#   make wheel   the sdist and a wheel for each kind of CPU, in dist/, as an index would take them
#   make test-wheel  build them, check them, and run one where no compiler is
#   make tables  write the pages of docs/ that are made from the code
#   make .triton install the real Triton, to test what is exported for it
#   make fmt     format and mend what can be mended
#   make clean   remove what the other verbs made
#
# For a machine with a GPU (benchmarks/README.md):
#
#   make gpu-wheels        here: what such a machine lacks, as wheels in .gpu/wheels
#   make gpu-check         there: the tests that need a GPU, and 20 measurements, in eight minutes
#   make gpu-bench PART=a  there: a part of the benchmark, a to f, each of eight minutes at most
#
# Setting up installs the versions in constraints.txt with uv, from the indexes and folders of wheels
# that pip is configured for. On Linux that may be a CUDA build of torch of several GB, so without
# an NVIDIA card torch comes from PyTorch's index of CPU builds, if that responds. To choose:
#   make demo PIP_ARGS="--extra-index-url URL"     or     UV_TORCH_BACKEND=cu130 make demo

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
# Such as "--peer transformers=.venv --peer vllm=/path/to/venv"; and more flags of the comparison.
BENCH_PEERS ?=
BENCH_ARGS ?=
# Of the machine with the GPU: its Python, and for the wheels that Python's version.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
PART ?= a
GPU_ARGS ?=
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
VENV := .venv
BIN := $(VENV)/bin
NATIVE := native/CMakeLists.txt $(wildcard native/src/*) $(wildcard native/include/loraplex/*)
# Order and examples of the tests: CI's are the same each time, those of the other verbs are new.
SEED ?= 1
LOWEST := .venv-lowest
# What `make test-busy` runs, and what runs the browser's tests.
BUSY_TESTS ?=
BUSY ?=
SOAK_MINUTES ?= 30
# Checkouts of triton-inference-server/tensorrtllm_backend, such as c2e65b8, cad2233 and v0.5.0.
ORIGINALS ?=
LOWEST_TESTS ?= tests/unit/core tests/unit/app tests/unit/serving tests/contract tests/e2e/test_serve.py
CODE := src tests examples benchmarks docs .ci
# Code and pages whose words are checked. Results stay as they were recorded.
LANGUAGE := src tests examples docs .ci $(wildcard *.md) $(wildcard benchmarks/*.py) \
	benchmarks/comparison benchmarks/gpu benchmarks/README.md
UV := $(BIN)/python .ci/install.py
# Modules are compiled once, not by each of the many processes of the tests, wherever the environment
# lets no bytecode be written into the tree.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/pycache $(BIN)/python -m pytest
INSTALL := $(UV) install --quiet --python $(BIN)/python -c constraints.txt $(PIP_ARGS)

.PHONY: demo test test-busy coverage test-all test-browser screenshots test-lowest vendor ray-test soak originals charts lint types bench docs wheel test-wheel tables fmt lock clean .triton \
	gpu-wheels gpu-check gpu-bench

$(BIN)/uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "loraplex needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt uv
	@touch $@

$(VENV)/.runtime: $(BIN)/uv pyproject.toml constraints.txt $(NATIVE)
	@echo "Downloading torch and compiling the kernels into $(VENV) (two to three minutes the first time) ..."
	$(INSTALL) -e .
	@touch $@

# The dependencies alone: `-e ".[dev]"` would compile the native kernels again.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test and lint tools ..."
	$(INSTALL) -r pyproject.toml --extra dev
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	$(INSTALL) -r pyproject.toml --extra bench
	@touch $@

# Neither torch nor the kernels: a version that no system wants leaves torch out.
$(VENV)/.docs: $(BIN)/uv pyproject.toml constraints.txt
	echo "torch; sys_platform == 'none'" > $(VENV)/without_torch.txt
	UV_TORCH_BACKEND=cpu $(INSTALL) -r pyproject.toml --extra docs --override $(VENV)/without_torch.txt
	@touch $@

# The oldest Triton that is supported: its compiler is tested, too.
OLDEST_TRITON := $(VENV)/triton-3.6.0

$(OLDEST_TRITON): | $(VENV)/.dev
	$(UV) install --quiet --python $(BIN)/python --no-deps --target $@ triton==3.6.0

# The real Triton, in a Python of its own: what `loraplex compat triton export` writes is tested with it.
.triton: | $(BIN)/uv
	$(BIN)/python benchmarks/install_triton.py $@ --pip-args="$(PIP_ARGS)"

# Clients that cannot be installed beside loraplex, because they want other versions of what it
# needs: they have a folder of their own, and the tests run them in processes of their own.
$(VENV)/clients: | $(VENV)/.dev
	$(UV) install --quiet --python $(BIN)/python --no-deps --target $@ \
		guidance==0.3.1 llguidance==1.5.0 lm-eval==0.4.13 lorax-client==0.6.3 \
		cohere==7.3.1 fastavro==1.13.1

demo: $(VENV)/.runtime
	$(BIN)/python examples/capitals.py

test: $(VENV)/.dev
	$(PYTEST) $(PYTEST_ARGS)

# Of the tests' own processes: what only an engine process or a worker runs counts as not run.
coverage: $(VENV)/.dev
	COVERAGE_FILE=$(VENV)/coverage $(PYTEST) --cov=src/loraplex --cov-report= $(PYTEST_ARGS)
	$(BIN)/python .ci/coverage_by_package.py $(VENV)/coverage

# Beside four busy processes: no test may depend on how fast the machine is.
test-busy: $(VENV)/.dev
	.ci/busy $(PYTEST) $(PYTEST_ARGS) $(BUSY_TESTS)

# With more examples of each property. CI takes a part of the slow tests: --slow-part=K/3.
test-all: $(VENV)/.dev $(OLDEST_TRITON) $(VENV)/clients .triton
	$(PYTEST) --hypothesis-profile=ci --hypothesis-seed=$(SEED) \
		--randomly-seed=$(SEED) --durations=30 \
		-m "not soak and not gpu and not network and not browser" $(PYTEST_ARGS)

$(VENV)/.browser: $(VENV)/.dev
	$(INSTALL) -r pyproject.toml --extra browser --extra docs
	@touch $@

# Here a browser that is missing fails; other verbs leave its tests out.
test-browser: $(VENV)/.browser
	.ci/install_chromium
	$(BUSY) env REQUIRE_BROWSER=1 $(PYTEST) -m browser --loadscope-reorder --randomly-seed=$(SEED) $(PYTEST_ARGS) tests/browser

screenshots: $(VENV)/.browser
	.ci/install_chromium
	REQUIRE_BROWSER=1 WRITE_SCREENSHOTS=1 $(PYTEST) -n 0 -m browser tests/browser/test_screenshots.py

# Needs Node's npm. Nobody who builds, tests or installs loraplex does.
vendor:
	$(PYTHON) .ci/vendor.py

# Minutes for each test: long schedules, kills, every property with 60 times CI's examples, and a
# server under faults for half an hour.
soak: $(VENV)/.dev $(OLDEST_TRITON) $(VENV)/clients .triton
	$(PYTEST) --hypothesis-profile=soak --timeout=7200 -m soak $(PYTEST_ARGS)
	$(PYTEST) --hypothesis-profile=soak --timeout=7200 \
		-m "not gpu and not network and not browser" $(PYTEST_ARGS) tests/property tests/contract/test_openapi.py
	PYTHONPATH=tests $(BIN)/python benchmarks/soak.py --minutes $(SOAK_MINUTES)
	$(MAKE) originals test-lowest charts ray-test

# What the originals' programs need in addition, beside loraplex's own packages.
$(VENV)/originals: | $(VENV)/.dev
	$(UV) install --quiet --python $(BIN)/python --no-deps --target $@ \
		pandas python-dateutil six tabulate

originals: $(VENV)/.dev $(if $(ORIGINALS),$(VENV)/originals)
	PYTHONPATH=tests:$(CURDIR)/$(VENV)/originals $(BIN)/python benchmarks/originals.py $(ORIGINALS)

# Helm as a library has 244 MB, so it is installed for this verb only.
$(VENV)/.charts: $(VENV)/.dev tests/deploy/requirements.txt
	$(INSTALL) -r tests/deploy/requirements.txt
	@touch $@

charts: $(VENV)/.charts
	$(PYTEST) $(PYTEST_ARGS) tests/deploy

$(VENV)/.ray: $(VENV)/.dev
	$(INSTALL) -r pyproject.toml --extra ray
	@touch $@

# One process: the cluster has many of its own.
ray-test: $(VENV)/.ray
	$(PYTEST) -n 0 -m soak $(PYTEST_ARGS) tests/cluster

# A Python of its own, with the lowest versions that pyproject.toml allows of what it names. torch is
# the exception: it is installed first, as everywhere, because the lowest version that a folder of
# CPU wheels or an index offers may be a CUDA build of several GB.
$(LOWEST)/.installed: $(BIN)/uv pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(UV) install --quiet --python $(LOWEST)/bin/python -c constraints.txt $(PIP_ARGS) torch
	$(UV) install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct $(PIP_ARGS) \
		"torch==$$($(LOWEST)/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')" \
		-r pyproject.toml --extra dev
	@touch $@

test-lowest: $(LOWEST)/.installed
	PYTHONPATH=src $(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/tools/check_language.py $(LANGUAGE)
	$(BIN)/python docs/tools/check_budget.py

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.bench .triton
	$(BIN)/loraplex bench --output benchmarks/results
	PYTHONPATH=tests $(BIN)/python benchmarks/batching.py --output benchmarks/results/batching-$(COMMIT)
	PYTHONPATH=tests $(BIN)/python benchmarks/transport.py --output benchmarks/results/transport-$(COMMIT)
	$(BIN)/python benchmarks/compare.py benchmarks/results/compare-$(COMMIT) $(BENCH_PEERS) $(BENCH_ARGS)

tables: $(VENV)/.runtime
	PYTHONPATH=docs:tests $(BIN)/python -m tools docs

docs: $(VENV)/.docs
	PYTHONPATH=src:docs:tests $(BIN)/python -m tools docs --built
	$(BIN)/mkdocs build --strict

# 600 MB of compilers and cmake, so they are installed for this verb only.
$(VENV)/.wheel: $(BIN)/uv pyproject.toml
	$(INSTALL) -r pyproject.toml --extra wheel
	@touch $@

wheel: $(VENV)/.wheel
	rm -rf dist
	$(BIN)/python .ci/wheels.py dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

test-wheel: wheel $(VENV)/.dev
	WHEELS=dist $(PYTEST) -n 0 --timeout=1800 $(PYTEST_ARGS) tests/wheel

fmt: $(VENV)/.dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# Versions are exact, names no index, and leave out the CUDA packages, which come with a CUDA build
# of torch in the versions that it wants. Versions that stand there already stay.
lock: $(BIN)/uv
	$(UV) compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
		--no-emit-index-url $(addprefix --extra ,dev browser bench docs tracing remote ray wheel) \
		$(LOCK_ARGS) pyproject.toml --output-file constraints.txt
	sed --in-place --regexp-extended '/^(cuda|nvidia)-/{/^nvidia-ml-py=/!d}' constraints.txt

clean:
	rm -rf $(VENV) $(LOWEST) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .gpu .triton

# vLLM's engine runs in the process of part f, so that its memory is given back.
GPU_RUN := VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHONPATH=.gpu/site:src:benchmarks:tests $(GPU_PYTHON) -B

gpu-wheels: $(BIN)/uv
	$(BIN)/python benchmarks/gpu/wheels.py --python $(GPU_PYTHON_VERSION)

gpu-check:
	$(GPU_PYTHON) benchmarks/gpu/unpack.py
	$(GPU_RUN) -m gpu.check $(GPU_ARGS)

gpu-bench:
	$(GPU_PYTHON) benchmarks/gpu/unpack.py
	$(GPU_RUN) -m gpu.bench $(PART) $(GPU_ARGS)
