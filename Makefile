# Two commands suffice on a fresh machine: `make train` and `make test`.
#   make train ARGS="ppo_acrobot seed=3"    any experiment, any override
#   make train TORCH=cpu                    the small CPU build of torch (Linux without an NVIDIA GPU)
#   make train PYTHON=/opt/python/bin/python3.12
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install train test apart test-apart check lint types format bench smoke clean distclean
.PRECIOUS: $(VENV)-apart/%/.installed

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
TORCH ?=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
TORCH_INDEX := $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu)
# Two workers on two cores: one thread each, or torch's thread pools fight over them. Each begins with one half of the
# files, so that what the tests of a file share is made once; who is done first takes over some of the other's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

help:
	@echo "make train    install into $(VENV) and train the default run (PPO on CartPole-v1); ARGS=... passes on"
	@echo "make test     install what the tests need and run them (without slow and gpu)"
	@echo "make test-apart  install EnvPool, Push-T and Meta-World (1 GB), which cannot live beside the others, and run their tests"
	@echo "make check    format, lint, types, fast tests: before each commit"
	@echo "make format   rewrite the code in the house format"
	@echo "make bench    time PPO on CartPole-v1 beside Stable-Baselines3, and the live display"
	@echo "make smoke    a few cycles of every experiment whose suite is installed; ARGS=dreamer: some of them"
	@echo "make clean    remove caches and build products (runs/ is never touched); distclean: $(VENV) too"

# The first Python >= 3.11 that can make a virtual environment; PYTHON=... chooses another.
$(BIN)/python:
	@fits='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c "$$fits" >/dev/null 2>&1; then \
	    echo "Making $(VENV) with $$candidate"; exec "$$candidate" -m venv $(VENV); fi; \
	done; \
	echo "error: RL Lab needs Python 3.11 or newer with venv; none of these is: $(CANDIDATES)" >&2; \
	echo "  Debian/Ubuntu: sudo apt install python3.11 python3.11-venv    macOS: brew install python@3.12" >&2; \
	echo "  or name one:   make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1

# Stamps remember an installation, so that it is repeated only when the requirements change.
$(VENV)/.installed-core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q $(TORCH_INDEX) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-core
	$(PIP) install -q $(TORCH_INDEX) -c constraints.txt -e ".[dev,box2d,minigrid,dmc,atari,crafter,vizdoom,retro,bsuite,popgym,memory-maze,brax,offline,export,sweeps,evolution,parquet,wandb,hub]"
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-core
	$(PIP) install -q $(TORCH_INDEX) -c constraints.txt -e ".[peers]"
	@touch $@

install: $(VENV)/.installed-core

train: $(VENV)/.installed-core
	@$(BIN)/rl-lab train $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

# Suites that are large or want other versions of what is installed: each lies over $(VENV) in an environment of its own.
APART := $(VENV)-apart
SUITES := envpool push_t metaworld
PACKAGE_envpool := envpool
PACKAGE_push_t := gym-pusht==0.1.8
PACKAGE_metaworld := metaworld==3.1.1 mujoco==3.3.0
CONSTRAINTS_envpool := -c constraints.txt

$(APART)/%/.installed: Makefile | $(VENV)/.installed-dev
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(@D)/lib/python*/site-packages)/base.pth
	$(@D)/bin/python -m pip --disable-pip-version-check install -q $(CONSTRAINTS_$*) $(PACKAGE_$*)
	@touch $@

apart: $(SUITES:%=$(APART)/%/.installed)

test-apart: apart
	@set -e; for suite in $(SUITES); do OMP_NUM_THREADS=1 PYTHONPATH=. $(APART)/$$suite/bin/python -m pytest -q \
	  -m "not slow and not gpu" tests/environments/suites/test_envpool.py tests/environments/suites/test_every_suite.py -k $$suite; done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-peers
	$(BIN)/python benchmarks/ppo_cartpole.py $(ARGS)
	$(BIN)/python benchmarks/display.py

smoke: $(VENV)/.installed-dev
	@$(BIN)/rl-lab smoke $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-apart
