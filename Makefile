# Each command makes .venv first if there is none. All that has to be there is Python 3.11 or newer,
# make and a package index; name another Python with: make PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TESTED := core plugins tests examples scripts

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-npu soak lint types format package check-extras constraints clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt scripts/bootstrap.py
	$(PYTHON) scripts/bootstrap.py $(VENV)
	@touch $@

venv: $(READY) ## make .venv with everything in it

demo: $(READY) ## draw digits through the asynchronous path into ./demo/
	$(BIN)/sidestream demo

# Many tests wait for a process to start. One thread of torch in each: more threads than cores make
# them slow. A file stays in one process, since what it sets up is for all of its tests; some share
# even more (tests/conftest.py). Not the files with most tests first: the long ones have few.
IN_PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(READY) ## run the tests (under three minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not soak" $(IN_PARALLEL)

test-slow: $(READY) ## run the slower tests: further models, doctor, bench, tensor parallelism
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not soak" $(IN_PARALLEL)

test-npu: ## run the NPU plugin over the real torch_npu and a simulated runtime (.venv-npu, g++)
	$(PYTHON) scripts/test_npu.py

# Without pytest's dump of tests that take long, as all of these may: it reads the stacks of threads that
# run, and has ended the whole process by SIGSEGV.
soak: $(READY) ## run the long tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -o faulthandler_timeout=0

lint: $(READY) ## check style, formatting, the floors of the package, spelling
	$(BIN)/ruff check $(TESTED)
	$(BIN)/ruff format --check $(TESTED)
	$(BIN)/lint-imports
	$(BIN)/codespell core plugins tests examples scripts docs README.md CHANGELOG.md

types: $(READY) ## check types
	$(BIN)/mypy

format: $(READY) ## mend what ruff can mend
	$(BIN)/ruff check --fix $(TESTED)
	$(BIN)/ruff format $(TESTED)

package: $(READY) ## build sdist and wheel into dist/ and check the wheel
	$(BIN)/python -m build --outdir dist
	$(BIN)/check-wheel-contents dist/*.whl

check-extras: $(READY) ## resolve every extra against the package index, installing nothing
	$(BIN)/python scripts/check_extras.py

constraints: $(READY) ## write the versions of .venv into constraints.txt
	sed '/^[^#]/d' constraints.txt > $(VENV)/constraints
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/' >> $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean: ## remove what the other commands made
	rm -rf $(VENV) .venv-npu demo dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find core plugins tests examples scripts -name __pycache__ -prune -exec rm -rf {} +
