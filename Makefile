# Everything that a change must pass; .ci/run calls the same targets. Another interpreter: make test PYTHON=python3.12
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
JOBS ?= 2
RUNS ?= 7
LAUNCHES ?= 2000
PYTEST = $(PYTHON) -m pytest -n $(JOBS) --dist worksteal
CLANG_FORMAT = $(PYTHON) -c "from clang_format import clang_format; clang_format()"
CPP = $(shell git ls-files '*.cpp' '*.h' '*.c')

# Without bytecode, every process compiles the program again, and every run rewrites the assertions of all tests
export PYTHONDONTWRITEBYTECODE =

.PHONY: help fast test fuzz shadow versions bench lint format docs explorer score

help:
	@echo "fast    quick tests, without processes, the shadow engine and the CUDA recorder"
	@echo "test    every test, or those of TESTS=PATH"
	@echo "fuzz    random launches, environments and files: LAUNCHES=2000, and a new SEED unless one is given"
	@echo "shadow  tests that run megatron-core and Transformer Engine without a GPU, or the megatron-core of CHECKOUT=FOLDER"
	@echo "versions  the same with several releases of megatron-core and Transformer Engine, or those of PAIRS=..."
	@echo "bench   benchmarks, each compared with a baseline that is measured in alternation"
	@echo "score   errors of the predictions for the measured runs in tests/data"
	@echo "lint    ruff, mypy, codespell, clang-format"
	@echo "format  rewrites the files as lint wants them"
	@echo "docs    the documentation site, into site/"
	@echo "explorer  the page on which a launch is changed, into site/explore; after docs, and needs npm"

fast:
	FUZZ=quick $(PYTEST) -m "not slow and not shadow and not cuda"

test:
	$(PYTEST) $(TESTS)

fuzz: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz:
	@echo "make fuzz SEED=$(SEED) LAUNCHES=$(LAUNCHES)"
	FUZZ=$(LAUNCHES) $(PYTEST) --hypothesis-seed=$(SEED) tests/fuzz

shadow: export PYTHONPATH := $(if $(CHECKOUT),$(abspath $(CHECKOUT))$(if $(PYTHONPATH),:$(PYTHONPATH)),$(PYTHONPATH))
shadow:
	$(PYTEST) -m shadow $(if $(CHECKOUT),tests/allocator_hook/shadow/test_formulas_against_shadow.py)

versions:
	$(PYTHON) tools/versions.py $(PAIRS)

bench:
	$(PYTHON) benchmarks/startup.py --runs $(RUNS)
	$(PYTHON) benchmarks/scale.py --runs $(RUNS)
	$(PYTHON) -m benchmarks.evaluations 300
	$(PYTHON) -m benchmarks.search --check --models Llama-3.1-405B --layouts 0
	$(PYTHON) benchmarks/launch_speed.py --runs $(RUNS)
	$(PYTHON) benchmarks/trace_speed.py 1000000
	$(PYTHON) benchmarks/megatron_estimate.py tests/data/measured/*.json

score:
	$(PYTHON) tools/score.py
	$(PYTHON) tools/score_offload.py

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m codespell_lib
	$(CLANG_FORMAT) --dry-run --Werror $(CPP)

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP)

docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

explorer:
	$(PYTHON) tools/build_explorer.py site/explore
