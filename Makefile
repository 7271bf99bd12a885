# Everything a newcomer or CI runs. Nothing here knows about one machine: versions are in setup.cfg and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart quickstart-infer test test-fast soak soak-faults soak-lightning check lint docs dist lab bench bench-exclusions bench-sweep bench-peer-copies bench-stragglers bench-symptoms bench-rerun bench-digests bench-rehearsal bench-many-ranks bench-recovery bench-fleet bench-inference bench-serving bench-lightning bench-checkpoint soak-integrations bench-integrations bench-metrics bench-plan bench-reporting failures soak-ray soak-digests bench-standby bench-just-in-time clean

# PYTHON=/path/to/python3.12 chooses another interpreter; TESTS="tests/unit -k journal" chooses tests and options.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info < (3, 11) or print("$(name)")' 2>/dev/null)))
TESTS ?=
# Where it is set, each of five workers and of thousands of small processes would compile what the one before had compiled.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
INSTALLED := .venv/installed

# All but those that look at the whole machine (ALONE). Most of their time they wait for Slurm, so five go
# on at once, each in a cluster of its own; those come first, and small files fill what is left at the end.
ALONE := tests/lab/test_lab_recovery.py
BESIDES := tests/slurm tests/lab tests/fuzz tests/unit tests/architecture tests/docs

# A cluster of its own, so that the tests neither meet nor take down the one of `make lab`.
TEST_LAB := /var/lib/slurmft-lab-make-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install slurmft into it, editable, with what tests and lint need

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@if [[ ! -x $(BIN)/python ]]; then \
		"$(or $(PYTHON),python3)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
			{ echo "slurmft needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
		"$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "no virtual environment: on Debian, apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@echo "installing into .venv (the first time torch is downloaded: a few minutes)"
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[train,inference,plan,lightning,huggingface,sync,report,ray,test,lint,docs]'
	@$(BIN)/python -m compileall -q slurmft
	@touch $@

quickstart: install ## train the example on this machine, with live progress (about a minute)
	@$(BIN)/slurmft quickstart

quickstart-infer: install ## let the trained example answer 200 prompts while a replica is killed (half a minute)
	@$(BIN)/slurmft quickstart --infer

test: lint ## lint, then every test on a real Slurm cluster that is built for it (root; else those are skipped)
	@export SLURMFT_LAB_FOLDER=$(TEST_LAB); \
	if [[ $$(id -u) == 0 ]]; then \
		take_down() { \
			[[ $$? == 0 ]] && options=--purge || options=; \
			said=$$($(BIN)/slurmft lab down $$options 2>&1) || echo "$$said" >&2; \
		}; \
		trap take_down EXIT; \
		$(BIN)/slurmft lab up --accounting || [[ $$? == 69 ]]; \
		{ command -v bwrap && command -v crun; } > /dev/null || apt-get install -q -y --no-install-recommends bubblewrap crun || \
			echo "the tests of containers are skipped"; \
		{ command -v prometheus && command -v prometheus-alertmanager; } > /dev/null || \
			apt-get install -q -y --no-install-recommends prometheus prometheus-alertmanager || \
			echo "the tests of alerts are skipped"; \
	fi; \
	if [[ -n "$(strip $(TESTS))" ]]; then $(BIN)/pytest $(TESTS); exit; fi; \
	failed=0; \
	$(BIN)/pytest $(ALONE) || failed=1; \
	$(BIN)/pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder --durations 30 --ignore $(ALONE) $(BESIDES) || failed=1; \
	exit $$failed

test-fast: lint ## lint, and what needs neither root nor Slurm and is quick: before each commit (4 minutes)
	@$(BIN)/pytest --numprocesses 4 --dist loadfile -m "not soak and not slow and not slurm and not gpu" \
		tests/architecture tests/docs tests/unit tests/slurm/test_local.py::test_stop_and_resume

soak: install ## the long tests that `make test` leaves out (root; three hours)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[soak]'
	@$(BIN)/pytest -m soak --numprocesses 2 --dist loadfile --durations 15 --ignore tests/slurm/test_huggingface.py \
		--ignore tests/slurm/test_kills_in_saves.py tests/slurm tests/unit tests/docs
	@$(BIN)/pytest -m soak --numprocesses 2 --dist load tests/fuzz
	@$(BIN)/pytest -m soak tests/lab

STOPS ?= 100
soak-lightning: install ## a hundred TERMs at a Lightning training, and a hundred kills in its saves (hours; goes on where it ended; STOPS=20)
	@SLURMFT_SOAK_STOPS=$(STOPS) $(BIN)/pytest -m soak tests/slurm/test_lightning.py tests/unit/integrations
	@$(BIN)/pytest -m soak tests/slurm/test_kills_in_saves.py -k lightning

FLIPS ?= 50
soak-digests: install ## fifty flipped bits on the lab, each found, its node left, the weights as ever (root; an hour; goes on where it ended; FLIPS=10)
	@SLURMFT_DIGEST_FLIPS=$(FLIPS) $(BIN)/pytest -m soak tests/slurm/test_digests.py

soak-ray: install ## Ray Train on the lab: a node dies, two are lent, kills of every process (root; 20 minutes)
	@$(BIN)/pytest -m "soak or not soak" --durations 10 tests/slurm/test_ray.py tests/slurm/test_ray_on_nodes.py

SEEDS ?= 1000-1099
soak-faults: install ## random faults on the lab until there are 1,000 of each storm (root; hours; goes on where it ended; SEEDS=100-160)
	@$(BIN)/python bench/random_faults --seeds $(SEEDS) $(FAULTS_OPTIONS)

soak-integrations: install ## a hundred stops and a hundred kills in saves of Hugging Face's Trainer, a stop of TRL's (root; hours; goes on where it ended; STOPS=20)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[soak]'
	@SLURMFT_SOAK_STOPS=$(STOPS) $(BIN)/pytest -m soak tests/slurm/test_huggingface.py $(TESTS)
	@$(BIN)/pytest -m soak tests/slurm/test_kills_in_saves.py -k huggingface

check: test ## everything CI runs

lint: install ## ruff, mypy --strict, shellcheck
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/shellcheck bin/* sbatch/*.sh bench/endings/trainers/*.sh .ci/run

docs: install ## write the reference pages and build the documentation into site/ (no network; a broken link fails)
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

dist: install ## build wheel and sdist into dist/, install the wheel into a clean environment, run its quickstart
	@rm -rf dist && $(BIN)/python -m build --quiet
	@place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT && "$(PYTHON)" -m venv "$$place/venv" && \
		"$$place"/venv/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt \
			"$$(ls -d "$$PWD"/dist/*.whl)[train]" && \
		cd "$$place" && venv/bin/slurmft --version && venv/bin/slurmft quickstart
	@ls -1 dist

lab: install ## a shell in a real Slurm cluster on this machine (root); `slurmft lab down` ends it
	@$(BIN)/slurmft lab up
	@echo 'in it:  slurmft submit configs/quickstart.yaml --wait --set run_folder=$$HOME/runs/quickstart'
	@$(BIN)/slurmft lab shell

bench: install ## measure every ending and what slurmft costs, into bench/results/ (root; 12 minutes, nothing else running)
	@$(BIN)/python bench/endings --output bench/results/endings.md

bench-exclusions: install ## measure the exclusion list, into bench/results/ (half a minute)
	@$(BIN)/python bench/exclusions --output bench/results/exclusions.md

bench-sweep: install ## measure one sweep over 10,000 nodes, into bench/results/ (a minute)
	@$(BIN)/python bench/sweep --output bench/results/sweep.md

bench-peer-copies: install ## measure copies to other nodes' memory, into bench/results/ (six minutes, nothing else running)
	@$(BIN)/python bench/peer_copies --output bench/results/peer_copies.md

bench-symptoms: install ## the confusion matrix of the ends of logs, into bench/results/ (seconds)
	@$(BIN)/python bench/symptoms --output bench/results/symptoms.md

bench-stragglers: install ## measure what straggler detection costs (20 s, nothing else running)
	@$(BIN)/python bench/stragglers --output bench/results/stragglers.md

bench-digests: install ## measure what digests of replicas cost (a minute, nothing else running)
	@$(BIN)/python bench/digests --output bench/results/digests.md

bench-recovery: install ## measure recovery from kill -9 beside torchrun and ft_launcher (root; 8 minutes, nothing else running)
	@$(BIN)/pip install --quiet --no-deps --target build/nvrx nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml
	@$(BIN)/python bench/recovery --packages build/nvrx --lab --output bench/results/recovery.md

bench-rehearsal: install ## measure what a spare's rehearsal saves (five minutes; a C++ compiler)
	@$(BIN)/python bench/rehearsal --output bench/results/rehearsal.md

bench-just-in-time: install ## measure the steps that each kind of fault between two checkpoints costs (15 minutes)
	@$(BIN)/python bench/just_in_time --output bench/results/just_in_time.md

bench-standby: install ## measure the takeover by a standby supervisor (four minutes, root)
	@$(BIN)/python bench/standby --output bench/results/standby.md

bench-many-ranks: install ## measure 16,384 ranks: commit, load, the supervisor, files of a whole cluster (six minutes, nothing else running; 2 GB)
	@$(BIN)/python bench/many_ranks --output bench/results/many_ranks.md

bench-fleet: install ## measure the supervisor with 2,048 simulated agents (two minutes, nothing else running)
	@$(BIN)/python bench/fleet --output bench/results/fleet.md

bench-inference: install ## measure batch inference, into bench/results/ (15 minutes, nothing else running)
	@$(BIN)/python bench/inference --output bench/results/inference.md

bench-reporting: install ## measure reports, with a journal of a million events (two minutes, nothing else running)
	@$(BIN)/python bench/reporting --output bench/results/reporting.md

failures: install ## see each failure on a lab and write docs/failures.md (root; 20 minutes; those seen already are left out)
	@$(BIN)/python bench/failures $(FAILURES_OPTIONS)

bench-metrics: install ## measure scrapes and files of metrics, with a journal of a million events (a minute)
	@$(BIN)/python bench/metrics --output bench/results/metrics.md

bench-plan: install ## measure slurmft plan for 2,000 nodes over 11 months (two minutes)
	@$(BIN)/python bench/plan --output bench/results/plan.md

bench-serving: install ## measure an endpoint, into bench/results/ (5 minutes, nothing else running)
	@$(BIN)/python bench/serving --output bench/results/serving.md

bench-lightning: install ## measure what the integration with Lightning costs in a step (2 minutes)
	@$(BIN)/python bench/lightning --output bench/results/lightning.md

bench-checkpoint: install ## measure what checkpoints cost beside torch's and NVRx's (root; 20 minutes, nothing else running)
	@$(BIN)/pip install --quiet --no-deps --target build/nvrx nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml
	@$(BIN)/python bench/checkpoint --nvrx build/nvrx --output bench/results/checkpoint.md
	@$(BIN)/python bench/checkpoint --exercise --lab --output bench/results/checkpoint-exercise.md

bench-integrations: install ## measure what the adapters of frameworks cost in each step (half a minute)
	@$(BIN)/python bench/integrations --output bench/results/integrations.md

bench-rerun: install ## measure what the re-run state machine costs (10 s, nothing else running)
	@$(BIN)/python bench/rerun --output bench/results/rerun.md

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -path ./runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
