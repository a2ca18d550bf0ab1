# make serve, make test: all that a fresh clone needs. make help lists the rest.
PY := .venv/bin/python
MODEL := demo-model/SmolLM2-135M-Instruct
HOST ?= 127.0.0.1
PORT ?= 30000
# Added to the server's command line, e.g. ARGS='--sparse-kv-budget 512'.
ARGS ?=
# Added to pytest's, e.g. TESTS='-k fork'.
TESTS ?=
# Added to the kernels' build, e.g. KERNELS='--arch 90 --verbose'.
KERNELS ?=
# Tests run side by side, files of them: a process takes 1 GB, with a server 5 GB; a server has the threads that are left.
ifndef JOBS
JOBS := $(shell awk -v n=$$(nproc) '/MemAvailable/ {m = int($$2 / 6e6); print (m < 1 ? 1 : m < n ? m : n)}' /proc/meminfo)
endif
THREADS ?= $(shell each=$$(expr $$(nproc) / $(JOBS)); [ $$each -gt 0 ] && echo $$each || echo 1)
PYTEST = -m pytest --timeout 900 --durations 10 --disable-warnings $(TESTS)
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
UNIT = OMP_NUM_THREADS=1 $(PY) $(PYTEST) $(SIDE_BY_SIDE) test/unit test/kernels
E2E = OMP_NUM_THREADS=$(THREADS) $(PY) $(PYTEST) $(SIDE_BY_SIDE) test/e2e
# What TESTS asks for may lie in one of the two alone: pytest's status 5, no tests, is none of a failure.
FOUND = || [ $$? -eq 5 ]

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Threads that spin while they wait for one another make a busy machine many times slower.
export OMP_WAIT_POLICY ?= PASSIVE
# Without compiled modules, each of a server's three processes would compile SGLang and torch at every start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env model serve test test-all check format kernels bench docs lock clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

.venv/.ready: requirements/lock.txt requirements/model.txt pyproject.toml python/cpu_platform/pyproject.toml scripts/setup_env.sh
	@scripts/setup_env.sh

$(MODEL)/prepared: .venv/.ready scripts/prepare_demo_model.py
	@$(PY) scripts/prepare_demo_model.py $(MODEL)
	@touch $@

env: .venv/.ready ## create .venv

model: $(MODEL)/prepared ## convert the demo model

serve: $(MODEL)/prepared ## serve the demo model on http://127.0.0.1:30000
	@echo "Serving on http://$(HOST):$(PORT); ready when the log says so (up to two minutes). Stop with Ctrl-C." >&2
	@SGLANG_PLATFORM=torch_cpu exec $(PY) -m sglang.launch_server --model-path $(MODEL) --host $(HOST) --port $(PORT) \
	  --sparse-kv dualdecoder --device cpu --dtype float32 --sleep-on-idle --enable-metrics $(ARGS)

test: check $(MODEL)/prepared ## lint, types and the fast tests
	$(UNIT) -m "not slow" $(FOUND)
	$(E2E) -m "not slow" $(FOUND)

test-all: check $(MODEL)/prepared ## every test: long contexts, many seeds, all configurations
	$(UNIT) $(FOUND)
	$(E2E) $(FOUND)

check: .venv/.ready ## lint, format and types only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/.ready ## put the sources in shape
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

kernels: .venv/.ready ## compile the CUDA sources for sm_80, sm_90 and sm_100 (needs nvcc, no GPU)
	$(PY) -m sglang.srt.sparse_kv.ops.build $(KERNELS)

bench: $(MODEL)/prepared ## decode speed on this CPU, with sparse KV and without
	SGLANG_PLATFORM=torch_cpu $(PY) -m benchmark.cpu_decode --model $(MODEL)

docs: .venv/.ready ## build docs/ as a site in build/site
	$(PY) scripts/doc_tables.py
	NO_MKDOCS_2_WARNING=1 uvx --from 'mkdocs>=1.6,<2' --with 'mkdocs-material>=9.5,<10' mkdocs build --quiet --site-dir build/site

lock: ## resolve requirements/dev.in anew
	uv pip compile --quiet --universal --python-version 3.10 --custom-compile-command "make lock" \
	  --upgrade requirements/dev.in --output-file requirements/lock.txt

clean: ## remove the environment, the demo model and caches
	rm -rf .venv demo-model build .pytest_cache .mypy_cache .ruff_cache .hypothesis
