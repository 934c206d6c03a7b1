# Everything runs from a clone on a fresh Debian 12 (or Ubuntu) machine, as root: each target installs what it needs.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
# The distribution's own Python where it is new enough: lab hosts of the same release can then run this environment too.
PYTHON ?= $(shell for python in /usr/bin/python3 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PACKAGES := tests/lab/packages.txt

.PHONY: help setup demo demo-down test test-rest test-all test-long test-fast test-spoilt test-gpu test-torch lint lint-oldest-python lint-text mutation docs pictures bench agent pyz lock collection release sanity clean
help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.apt: $(PACKAGES)
	tests/apt-install $(PACKAGES)
	mkdir -p $(VENV) && touch $@

$(VENV)/.installed: pyproject.toml tools/host-packages.txt $(VENV)/.apt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m tools.host_packages fetch
	touch $@

setup: $(VENV)/.installed  ## Install what gpuprov and its tests need: Debian packages, a virtual environment.

demo: setup  ## Start two lab hosts, install them over SSH, verify them.
	@$(BIN)/python -m tests.demo up

demo-down:  ## Remove every trace of the demo.
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m tests.demo down; fi

# What runs on hosts, as the agent and as the one-file program, on any Python from this one on.
OLDEST_PYTHON := 3.9
TRAVELS := gpuprov playbooks/plugins/modules

lint: setup lint-oldest-python lint-text  ## Format, lint, types, import layers, the oldest Python, text, playbooks.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/ansible-lint

lint-oldest-python: setup
	$(BIN)/vermin --quiet --violations --no-tips --target=$(OLDEST_PYTHON)- $(TRAVELS)

lint-text: setup
	$(BIN)/codespell gpuprov playbooks docs tools tests benchmarks inventories *.md Makefile
	$(BIN)/python -m tools.plain_english

# Root file systems for hosts, by release: one core builds them while the other lints.
base-%: setup
	$(BIN)/python -m tests.lab bases $*

# More at once than cores, for tests wait for hosts; docs/testing.md says what is in which tier.
WORKERS := 3
test-rest: WORKERS := 4
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=30

test: setup  ## Lint, all unit tests, one real sample of each kind (12 minutes on 2 cores).
	$(MAKE) --jobs=2 --output-sync=target lint base-bookworm base-bullseye
	$(PYTEST) --strict-skips -m 'not slow and not long' --junitxml=build/results.xml

$(VENV)/.apt-rest: tests/lab/packages-rest.txt $(VENV)/.apt
	tests/apt-install tests/lab/packages-rest.txt
	touch $@

test-rest: setup $(VENV)/.apt-rest  ## What `make test` leaves out: all hosts, more examples.
	$(MAKE) --jobs=2 --output-sync=target base-bookworm base-bullseye base-trixie base-rpm
	$(PYTEST) --strict-skips -m '(slow or property) and not long' --hypothesis-profile=thorough

test-all: test test-rest  ## Both (45 minutes on 2 cores).

$(VENV)/.apt-long: tests/lab/packages-long.txt $(VENV)/.apt
	tests/apt-install tests/lab/packages-long.txt
	touch $@

test-long: setup $(VENV)/.apt-long  ## What takes long and changes seldom, and new examples; by hand, not in CI.
	$(MAKE) --jobs=2 --output-sync=target base-bookworm base-trixie
	GPUPROV_RACE_SECONDS=120 $(PYTEST) -m 'long or property' --hypothesis-profile=new

test-fast: setup  ## The unit tests that need no root.
	$(PYTEST) -m 'not root' tests/unit

test-spoilt: setup  ## Unit tests and ten integration files on a machine that is spoilt on purpose: the same results.
	$(BIN)/python -m tests.spoilt

test-gpu: setup  ## By hand, as root, on a machine with a real GPU: a report to send (TORCH_IMAGE=… for PyTorch too).
	$(BIN)/python -m tests.gpu --torch-image "$(TORCH_IMAGE)"

test-torch: setup  ## By hand: a genuine PyTorch (2.9 GB from PyPI) in containers on the simulated GPUs.
	nice -n 10 $(BIN)/python -m tests.genuine.torch

mutation: setup  ## By hand: put faults into the modules on which safety rests, and count those that their unit tests find.
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[mutation]'
	nice -n 15 $(BIN)/python -m tests.world $(BIN)/python -m tests.mutation

docs: setup  ## Write the references of configuration and command line, the pages on distributions and on causes.
	$(BIN)/python -m tests.distributions_page
	$(BIN)/python -m tests.doctor_page
	$(BIN)/python -m tools.cli_page
	$(BIN)/python -m tools.ansible_page
	@sed -i '/^<!-- written by make docs/q' docs/configuration.md && $(BIN)/gpuprov options --markdown >>docs/configuration.md

pictures: demo  ## Write the README's pictures from the demo's own output; needs chromium.
	$(BIN)/python -m tools.pictures docs/pictures

bench: setup  ## Measure what is claimed of speed: container starts, boots, first runs, runs that change nothing, a thousand hosts (half an hour).
	$(BIN)/python -m benchmarks.container_start
	$(BIN)/python -m benchmarks.boot_cost
	$(BIN)/python -m benchmarks.first_install
	$(BIN)/python -m benchmarks.no_change
	$(BIN)/python -m benchmarks.fleet_no_change
	$(BIN)/python -m benchmarks.thousand_hosts

agent: setup  ## Build the agent zipapp as gpuprov pushes it to hosts.
	$(BIN)/gpuprov agent build -o build/gpuprov-agent.pyz

pyz: setup  ## Build gpuprov-host.pyz: the commands for one machine in one file, for Python 3.9 and later.
	$(BIN)/python -m tools.host_program build/gpuprov-host.pyz

lock: setup  ## Lock the newest releases of the packages in the programs for hosts, which take security fixes this way.
	$(BIN)/python -m tools.host_packages lock

collection: setup  ## Build the Ansible collection gpuprov.host, the agent inside.
	$(BIN)/python playbooks/collection.py build/ansible_collections/gpuprov/host
	$(BIN)/ansible-galaxy collection build --force --output-path build build/ansible_collections/gpuprov/host

release: setup  ## Build wheel, sdist, collection, agent, one-file program, .deb, .rpm, SBOM and SHA256SUMS into dist/: the same bytes each time.
	rm -rf dist
	$(BIN)/python -m tools.release dist

sanity: setup  ## All sanity tests of ansible-test for the collection; needs PyPI.
	$(BIN)/python playbooks/collection.py build/ansible_collections/gpuprov/host
	cd build/ansible_collections/gpuprov/host && git init -q . && PATH=$(CURDIR)/$(BIN):$$PATH ansible-test sanity --python \
		$$($(CURDIR)/$(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')

clean: demo-down  ## Remove what was built and cached.
	rm -rf $(VENV) .cache .ansible build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
