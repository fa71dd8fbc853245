# Even Keel. `make demo` runs the main job, `make test` passes the tests; both set the machine up first.
# Needs Python 3.11 (or 3.12) with venv, and make. Everything else goes into .venv from ops/locks/cpu.txt.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := ops/locks/cpu.txt
DEMO   := pipeline/recipes/demo.yaml
SHARED := -n 3 --dist loadfile
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-repeated test-installs test-cluster test-all mutations chaos check bench evidence docs gpu gpu-rehearsal clean

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## Make .venv from the lock file (about 2 minutes; a second call returns at once).

$(STAMP): $(LOCK) ops/locks/triton.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or run make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) ops/install.py $(VENV) $(LOCK)

demo: install  ## Fine-tune a tiny model, then train it with P3O on FP8 rollouts; ends with a table and a report.
	@[ -f runs/models/demo-base/config.json ] || $(BIN)/evenkeel model new runs/models/demo-base
	@[ -f runs/models/demo/config.json ] || $(BIN)/evenkeel sft $(DEMO) --out runs/models/demo --steps 500 --batch-size 32 \
	    --set model.path=runs/models/demo-base --set learner.tensor_parallel=1 --set learner.data_parallel=2
	@$(BIN)/evenkeel train $(DEMO)

test: install  ## The loop, the learner and the engines, real ones, three files at a time (about 11 minutes).
	@$(BIN)/python -m pytest $(SHARED) --durations 10 -m "not slow and not cluster and not installs"

test-slow: install  ## Longer runs, tools around training, and every example of the property tests.
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest $(SHARED) --durations 10 -m "(slow or hypothesis) and not repeated and not cluster"

test-installs: install  ## Extras and locks resolve, and six steps with the learner's packages for GPUs (Python 3.12, 4 GB; 5 minutes).
	@./ops/install_learner.sh .venv-learner && $(BIN)/python -m pytest --durations 5 -m installs tests/installs

test-cluster: install  ## Several hosts, out of namespaces: a run over four of them, faults, Slurm (as root; tests/cluster/README.md; ONLY).
	@$(BIN)/python -m tests.cluster.rig && \
	    $(BIN)/python -m pytest -o faulthandler_timeout=0 --durations 10 -m cluster $(or $(ONLY),tests/cluster)

test-repeated: install  # further combinations of what slow tests show
	@$(BIN)/python -m pytest $(SHARED) --durations 10 -m repeated

test-all: test test-slow test-repeated  ## All tests that need no root.

mutations: install  ## Break the product on purpose in sixty places: some test must catch each (about 5 minutes).
	@$(BIN)/python -m tests.mutations $(ONLY)

chaos: install  ## The worst day, on purpose: kills, faults, bit flips, malformed input (an hour a call, each goes on; PARTS, ARGS).
	@$(BIN)/python -m tests.chaos $(PARTS) $(ARGS)

check: install  ## Format, lint and types.
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

bench: install  ## The loop beside TRL, its pace, the learner beside Megatron-Core, publishes beside a copy, deltas (TRL: .venv-bench).
	@./ops/install_bench.sh $(BIN) .venv-bench
	@for what in loop pace "learner step" "learner plain" "learner mismatch" "learner memory" "learner long" publish delta collector composition; do \
	    echo "tests.bench.$$what"; PYTHONWARNINGS=ignore $(BIN)/python -m tests.bench.$$what || exit 1; \
	done

evidence: install  ## Measure tests/evidence/matrix.yaml and robust.yaml into docs/evidence/; resumable. QUICK=1: 20 minutes, the first alone, into runs/.
	@$(if $(QUICK),,$(BIN)/python -m tests.evidence robust &&) $(BIN)/python -m tests.evidence $(if $(QUICK),--quick)

docs: install $(VENV)/.docs  ## The documentation as a site that opens from the disk: build/docs/index.html (no network).
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore -m mkdocs build --strict --quiet --config-file ops/docs/mkdocs.yml
	@echo "ready: build/docs/index.html; to search it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs"

$(VENV)/.docs: ops/locks/docs.txt
	@$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check -r $<
	@touch $@

gpu:  ## Measure on one GPU what CPUs cannot show, into ops/measurements (PYTHON: that of the learner; ops/gpu/README.md).
	@./ops/gpu/check.sh --python $(PYTHON) $(ARGS)

gpu-rehearsal: install  ## The same scripts at tiny sizes on the CPU, into runs/: runs them once, measures nothing (5 to 7 minutes).
	@$(BIN)/python -m tests.gpu --rehearse --deadline-s 900 --out runs/gpu-rehearsal

clean:  ## Remove .venv and caches; runs are kept.
	rm -rf $(VENV) .venv-bench .venv-learner .mypy_cache .pytest_cache .ruff_cache .hypothesis
