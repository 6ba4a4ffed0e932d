# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
# What each target needs it sets up first: scripts/setup.sh makes the virtual environment in $(VENV).

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := .cache/release/tools
# Two cores: other processes work while the tests of some wait, and emulation (machines) gives way to the engines.
PYTEST := sh scripts/test.sh $(BIN)/python
unexport PYTHONDONTWRITEBYTECODE  # else each of the tests' processes compiles numapin and the tests

.PHONY: setup demo docs test machines check lint format types vm package trials clean

setup: $(READY)  ## make the virtual environment, which every other target does that needs it

demo: $(READY)  ## run the main job: bound ranks on the example, on GPUs where there are any
	$(BIN)/python scripts/demo.py

test: $(READY)  ## run the tests, but for those of `make machines`; the few that fail run once more, alone
	$(PYTEST) --numprocesses=4 --dist=loadgroup --ignore=tests/vm --ignore=tests/engines -m "not alone and not slow"
	$(PYTEST) --numprocesses=0 -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests)  # to collect all tests takes 12 s
	@echo "slow tests, in virtual machines, below real engines and of several hosts: make machines"

machines: $(READY)  ## run the slow tests: of whole jobs, below Slurm and Open MPI, in virtual machines (`make vm` unpacks them, once)
	$(PYTEST) --numprocesses=4 --dist=loadgroup -m "slow and not alone" $$(grep -rl --include='test_*.py' 'mark\.slow' tests)
	$(PYTEST) --numprocesses=3 --dist=loadgroup --no-loadscope-reorder -m "not alone" tests/engines tests/vm

check: lint types test machines  ## what CI runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

docs: $(VENV)/.docs  ## build the documentation into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

vm:  ## unpack QEMU and a kernel into .cache/vm for the tests on machines with several NUMA nodes
	python3 scripts/make_vm.py

package: $(TOOLS)/.ready  ## build sdist and wheels into dist/, and check them
	sh scripts/package.sh $(TOOLS)/bin

trials: trial-none trial-2.9 trial-newest  ## install what was built beside no torch, torch 2.9 and the newest; test it there

trial-%:
	sh scripts/trial.sh $*

$(TOOLS)/.ready: packaging/release-tools.txt  # with hashes; no sdist, whose build would fetch others without
	$${PYTHON:-python3} -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --require-hashes --only-binary :all: -r packaging/release-tools.txt
	touch $@

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	sh scripts/setup.sh $(VENV)
	touch $@

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf site $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache dist build
