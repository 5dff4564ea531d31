PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BUILT := .venv/.built
# Tests run in two processes at a time, each in its own fixed order. pytest-xdist has a thread in
# each, and a call during which another thread runs is refused now and then.
BESIDE := --jobs=2 --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync)
# Folders of tests that have a process of their own, the longest first. All others share one. In a
# process that has fewer tests, collections of garbage have less to look through.
ALONE := dispatch recording laws backends property training models telemetry auditing writes channels tracing integrations
# What `make quick` runs in two processes; and files that it leaves out.
core := $(addprefix tests/unit/,dispatch channels validity values)
around := $(filter-out $(core) %__pycache__,$(patsubst %/,%,$(wildcard tests/unit/*/))) tests/unit/test_ground.py
LONGEST := $(addprefix tests/unit/,auditing/test_judge.py backends/test_backends.py backends/test_floats.py \
	channels/test_share.py dispatch/test_background.py dispatch/test_bystanders.py \
	dispatch/test_figures_of_compiles.py dispatch/test_identity.py \
	dispatch/test_lazy_setup.py dispatch/test_no_waste.py \
	dispatch/test_numbers_that_runs_set.py dispatch/test_objects_that_lie.py \
	dispatch/test_open_identity.py dispatch/test_open_memos.py \
	dispatch/test_open_numbers.py dispatch/test_open_numbers_end.py \
	dispatch/test_open_state.py dispatch/test_open_values.py \
	dispatch/test_plain_programs_never_raise.py dispatch/test_training_steps.py \
	dispatch/test_watched.py \
	recording/capture/test_blocks.py recording/capture/test_call_dependencies.py \
	recording/capture/test_data.py recording/capture/test_entry_values.py \
	recording/capture/test_failures.py recording/capture/test_recorded_imports.py \
	recording/capture/test_secrets.py recording/format/test_hostile.py \
	recording/format/test_table.py recording/replay/test_cli.py \
	recording/replay/test_repro.py recording/replay/test_sandbox.py \
	recording/replay/test_unusual_names_and_files.py recording/replay/test_versions.py \
	report/test_browser.py training/test_processes.py writes/test_mutation.py \
	writes/test_watching.py)
folders = $(wildcard $(foreach name,$(1),tests/$(name) tests/unit/$(name)))

.PHONY: help demo quick test lint bench versions coverage soak mutate screenshots clean

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

# torch first and pinned: a range would pull a build with several gigabytes of CUDA libraries.
$(READY): pyproject.toml
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev,bench]'
	@touch $@

# The C modules, built again when their sources change. Without a compiler they stay absent.
$(BUILT): $(READY) setup.py src/tripwire/native.h $(wildcard src/tripwire/*/_*.c)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

demo: $(BUILT)  ## a story in forty lines: compiled, changed, failed, replayed; ARGS=--graph prints a graph
	@$(BIN)/python examples/demo.py $(ARGS)

quick: $(BUILT)  ## ruff, then most of the unit tests; leaves out mypy, AOTAutograd, Inductor and the longest files
	$(BIN)/ruff check .
	$(MAKE) $(BESIDE) quick-core quick-around

quick-%: $(BUILT)
	$(BIN)/python -m pytest -k "not aot_eager and not inductor" $(addprefix --ignore=,$(LONGEST)) $($*)

test: $(BUILT)  ## lint, and every test but the slow ones
	$(MAKE) $(BESIDE) test-others $(addprefix test-,$(ALONE)) lint

test-others: $(BUILT)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(call folders,$(ALONE)))

test-%: $(BUILT)
	$(BIN)/python -m pytest $(call folders,$*)

lint: $(BUILT)  ## ruff, and mypy --strict over src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BUILT)  ## time tripwire beside its peers, in one run; print every claim, draw the plots
	$(BIN)/python benchmarks/bench_trace.py --json benchmarks/results/trace.json
	$(BIN)/python benchmarks/bench_architectures.py --json benchmarks/results/architectures.json
	$(BIN)/python benchmarks/bench_memory.py --json benchmarks/results/memory.json
	$(BIN)/python benchmarks/bench_dispatch.py --json benchmarks/results/dispatch.json
	$(BIN)/python benchmarks/bench_steady.py --json benchmarks/results/steady.json
	$(BIN)/python benchmarks/bench_open.py --json benchmarks/results/open.json
	$(BIN)/python benchmarks/varying.py --json benchmarks/results/varying.json
	$(BIN)/python benchmarks/bench_start.py --json benchmarks/results/start.json
	$(BIN)/python benchmarks/bench_start.py --layers 36 --rounds 3 --json benchmarks/results/start-36.json
	$(BIN)/python benchmarks/bench_bystander.py --json benchmarks/results/bystander.json
	$(BIN)/python benchmarks/bench_record.py --json benchmarks/results/record.json
	$(BIN)/python benchmarks/bench_telemetry.py --json benchmarks/results/telemetry.json
	$(BIN)/python benchmarks/bench_report.py --json benchmarks/results/report.json
	$(BIN)/python benchmarks/summary.py

# torch must be installed in each: a venv beside this folder's, .venv-3.12 and so on, made once.
versions:  ## every test but the slow ones on every interpreter that pyenv has and tripwire supports
	@failed=; for found in $$(ls -d $$(pyenv root)/versions/3.1[123].*[0-9]); do \
	  folder=.venv-$$(basename $$found); \
	  test -e $$folder || { $$found/bin/python -m venv $$folder && \
	    $$folder/bin/python -m pip install --quiet torch==2.13.0 && \
	    $$folder/bin/python -m pip install --quiet --editable '.[dev]'; } || exit 1; \
	  $$folder/bin/python setup.py --quiet build_ext --inplace || exit 1; \
	  echo "== $$(basename $$found)"; \
	  $$folder/bin/python -m pytest || failed="$$failed $$(basename $$found)"; \
	done; test -z "$$failed" || { echo "== failed on:$$failed"; exit 1; }

coverage: $(BUILT)  ## which models are captured whole, beside torch.compile, torch.export and torch.jit.trace
	$(BIN)/python benchmarks/coverage.py --markdown docs/coverage.md --json benchmarks/results/coverage.json

soak: $(BUILT)  ## the slow tests: real models, torch's operator database, a server under load; 200,000 steps of the law machine
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=0
	PYTHONPATH=tests $(BIN)/python -m property.machine --steps 200000

mutate: $(BUILT)  ## break one guard, wire or effect at a time: the law machine and the audit must notice each
	$(BIN)/python -m pytest tests/property/test_faults.py tests/property/test_audit_faults.py -m "slow or not slow" -o faulthandler_timeout=0 -rs

screenshots: $(BUILT)  ## the report's pages as docs/report-*.png; needs chromium
	TRIPWIRE_SCREENSHOTS=docs $(BIN)/python -m pytest tests/unit/report/test_browser.py

clean:  ## remove the environment and every cache
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
