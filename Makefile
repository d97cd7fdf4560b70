# make run    install what is needed, then open ltui with the quickstart run started
# make test   install what the tests need, then run the gate (12 minutes on two cores)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
LTUI := $(VENV)/bin/ltui
SOURCES := app training widgets presets tests
# Compiled modules are kept: the tests start hundreds of processes, each of which would compile anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-all nodes versions bench peers gpu offline data presets signals exactness cycles chaos zoo fuzz format lint types contracts unit lock clean

help:
	@printf '%s\n' \
	  'make run      install what is needed, then open ltui with the quickstart run started' \
	  'make test     install what the tests need, then ruff, types, import contracts, tests' \
	  'make test-all run the slow tests, which make test leaves out (30 minutes)' \
	  'make nodes    run on two machines: namespaces, ssh, a SLURM cluster (30 minutes)' \
	  'make versions run with the oldest and the newest Lightning and torch (10 minutes)' \
	  'make bench    measure the promised numbers, each beside its bound' \
	  'make peers    measure the tools of the field beside ltui, on the same work (25 minutes)' \
	  'make gpu      check and measure everything that needs a real NVIDIA GPU (30 to 45 minutes)' \
	  'make data     read .beton files in every way (5 minutes)' \
	  'make presets  run every preset by ltui itself, scaled down (10 minutes)' \
	  'make exactness resume every loader at every stop, compare bit for bit (two hours)' \
	  'make cycles   stop and resume one run 200 times at random, compare bit for bit' \
	  'make chaos    kill every process at random moments, LTUI_CHAOS_KILLS times (20 minutes)' \
	  'make zoo      inject every fault, listen to healthy runs, print the table (45 minutes)' \
	  'make fuzz     open damaged incident files, FUZZ=10000 of them (4 minutes)' \
  'make signals  send every stop signal to every process of a run (18 minutes)' \
	  'make format   rewrite the sources in the house format' \
	  'make lock     refresh the locked versions from pyproject.toml' \
	  'make clean    remove everything that make created'

# The stamps say what was installed from which lock; a second call finds them and starts at once.
$(VENV)/.installed-run: .ci/setup .ci/requirements.txt pyproject.toml
	@bash .ci/setup run
	@touch $@

$(VENV)/.installed-test: .ci/setup .ci/requirements.txt pyproject.toml
	@bash .ci/setup test
	@touch $(VENV)/.installed-run $@

run: $(VENV)/.installed-run
	@if [ -t 0 ] && [ -t 1 ]; then \
	  $(LTUI) run quickstart --detach >/dev/null && exec $(LTUI) attach last; \
	else exec $(LTUI) run quickstart; fi

test: lint types contracts unit

lint: $(VENV)/.installed-test
	@echo '== ruff'
	@$(VENV)/bin/ruff check $(SOURCES)
	@$(VENV)/bin/ruff format --check $(SOURCES)

# The import names differ from the folders, so the type checker reads the tree through a link.
build/path/ltui: | build/api/ltui/api
	@mkdir -p build/path && ln -sfn ../.. build/path/ltui

build/api/ltui/api:
	@mkdir -p build/api/ltui && ln -sfn ../../../app/api build/api/ltui/api

build/path/ltui_rank:
	@mkdir -p build/path && ln -sfn ../../training/rank_api build/path/ltui_rank

types: $(VENV)/.installed-test build/path/ltui build/path/ltui_rank
	@echo '== mypy --strict'
	@$(VENV)/bin/mypy -p ltui.api -p ltui.app -p ltui.training -p ltui.widgets -p ltui.presets -p tests

contracts: $(VENV)/.installed-test
	@echo '== import contracts'
	@$(VENV)/bin/lint-imports --no-cache

# Three workers, because most tests of processes wait. Those that train with torch take all cores, so
# they are one group (tests/conftest.py), which one worker runs.
unit: $(VENV)/.installed-test
	@echo '== pytest, without the slow tests'
	@$(PY) -m pytest -n 3 --dist loadgroup -m 'not slow' -rfEs --durations=25

# One at a time: each of them is a real training with two ranks or more.
test-all: $(VENV)/.installed-test
	@echo '== pytest, the slow tests'
	@$(PY) -m pytest -m 'slow and not nodes' -rfEs

# Each needs rights or packages (network namespaces, sshd, SLURM) and is skipped without them.
nodes: $(VENV)/.installed-test
	@echo '== pytest, runs on several machines'
	@$(PY) -m pytest -m nodes -rfEs

# Installs the oldest and the newest supported Lightning and torch below build/versions.
versions: $(VENV)/.installed-test build/path/ltui build/path/ltui_rank
	@$(PY) -m tests.versions

bench: $(VENV)/.installed-test
	@$(PY) -m tests.bench

# Installs each peer into an environment of its own below build/peers, and renews docs/benchmarks.md.
peers: $(VENV)/.installed-test
	@$(PY) -m tests.bench.peers --write

# ONLY='readings faults' for a part; OUT=folder for the results; REHEARSAL=1 tries the scripts on the
# CPU. PYTHON=/path/to/python uses an environment that has ltui already. With WHEELS=folder it needs
# torch, Lightning and a few more (docs/benchmarks.md): the rest is installed from the folder, beside it.
GPU_PY := $(or $(PYTHON),$(PY))
ifdef WHEELS
GPU_PY := build/gpu-venv/bin/python
gpu: offline
else ifndef PYTHON
gpu: $(VENV)/.installed-test
endif
gpu:
	@$(GPU_PY) -m tests.gpu.hardware $(ONLY) $(if $(OUT),--out $(OUT)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(LIMIT),--limit $(LIMIT)) \
	  $(if $(REHEARSAL),--rehearsal) $(if $(WRITE),--write)

offline:
	@bash .ci/setup-offline $(or $(PYTHON),python3) $(WHEELS) build/gpu-venv

data: $(VENV)/.installed-test
	@LTUI_DATA=all $(PY) -m pytest tests/data

presets: $(VENV)/.installed-test
	@LTUI_PRESETS=all $(PY) -m pytest tests/presets/test_all_presets.py

# RANKS=2,4 CASES='own:*,*:mid-epoch' for a part; with KEEP=folder parts add up to one table, and
# what was broken off goes on.
exactness: $(VENV)/.installed-test
	@LTUI_EXACTNESS=all LTUI_EXACTNESS_RANKS=$${RANKS:-1,2,4} LTUI_EXACTNESS_CASES="$${CASES:-*}" \
	  $${KEEP:+env LTUI_EXACTNESS_FOLDER="$$KEEP"} $(PY) -m pytest -s tests/rank/test_exactness.py

# LTUI_CHAOS_KILLS (100), LTUI_CHAOS_TORCH_KILLS (15 of 100), LTUI_CHAOS_SEED (drawn and printed),
# LTUI_CHAOS_KEEP=folder for the files of a failure. NODES=2: the same on two machines (an hour).
chaos: $(VENV)/.installed-test
	@if [ "$${NODES:-1}" = 2 ]; then exec $(PY) -m tests.chaos.two_nodes; fi; \
	  LTUI_CHAOS=all $(PY) -m pytest tests/chaos tests/supervise/test_disk_full.py && \
	  $(PY) -m tests.app.key_storm && \
	  $(PY) -m tests.chaos

signals: $(VENV)/.installed-test
	@LTUI_SIGNALS=1 $(PY) -m pytest tests/system/test_signals.py

# NODES=2: the faults whose culprit is on another machine, and faults of machines (20 minutes).
zoo: $(VENV)/.installed-test
	@if [ "$${NODES:-1}" = 2 ]; then exec $(PY) -m tests.nodes.machine_faults; fi; \
	  failed=0; LTUI_POLICY=all $(PY) -m pytest tests/faults/test_policy.py || failed=1; \
	  LTUI_LIMITS=1 $(PY) -m pytest tests/system/test_limits.py || failed=1; \
	  $(PY) -m tests.faults || failed=1; exit $$failed

# CYCLES=20 SEED=7 for fewer, or for the same again.
cycles: $(VENV)/.installed-test
	@folder=$$(mktemp -d) && OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= \
	  $(PY) -m tests.rank.exactness.cycles $$folder $${CYCLES:-200} $${SEED:-}

fuzz: $(VENV)/.installed-test
	@$(PY) -m tests.runs.fuzz $${FUZZ:-10000} --incident

format: $(VENV)/.installed-test
	@$(VENV)/bin/ruff check --fix $(SOURCES) || true
	@$(VENV)/bin/ruff format $(SOURCES)

lock:
	@bash .ci/lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find .ci $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
