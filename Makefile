# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
# What each target needs it sets up first: scripts/setup.sh makes the virtual environment in $(VENV).

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo docs test check lint format types vm bench clean

demo: $(READY)  ## run the main job: bound ranks on the example, on GPUs where there are any
	$(BIN)/python scripts/demo.py

test: $(READY)  ## run the tests; those in virtual machines need `make vm` once
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadgroup --ignore=tests/vm --ignore=tests/engines -m "not alone"
	$(BIN)/python -m pytest --ignore=tests/vm --ignore=tests/engines -m alone
	$(BIN)/python -m pytest tests/engines
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile tests/vm

check: lint types test  ## what CI runs

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
	$(BIN)/python scripts/docs_check.py site

vm:  ## unpack QEMU and a kernel into .cache/vm for the tests on machines with several NUMA nodes
	python3 scripts/make_vm.py

bench: $(READY)  ## measure start-up and planning against torchrun; results on stdout
	$(BIN)/numapin bench launch
	$(BIN)/python -m scripts.bench_plan

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	sh scripts/setup.sh $(VENV)
	touch $@

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf site $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache dist build
