# make demo, make test: both work in a fresh clone with Python 3.10-3.13 and nothing else. Nothing is redone that
# is done; `make clean` starts over.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard transcribe/kernels/csrc/*)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
CLIP := $(BIN)/python -c 'import sys; from transcribe.default_model import clip; print(clip(sys.argv[1]))'

.PHONY: help demo test test-slow cluster parity-nemo check speed kernel-speed memory clean

help:
	@echo "make demo       install, make the default model, transcribe a clip"
	@echo "make test       install what tests need and run them"
	@echo "make test-slow  the sweeps that take minutes"
	@echo "make cluster    what --ray does, on a Ray cluster of this machine"
	@echo "make parity-nemo  record afresh what NeMo computes (800 MB of packages), and compare"
	@echo "make check      lint and types"
	@echo "make speed      time the default model (ARGS='--model M' another)"
	@echo "make kernel-speed  products with packed weights against the machine's limits"
	@echo "make memory     its peak memory against the length of a recording (Linux)"
	@echo "make clean      remove the environment and every generated file"

demo: $(INSTALLED)
	@$(BIN)/python scripts/import_default_model.py
	@clip=$$($(CLIP) beckett.wav) && echo "transcribe $$(basename $$clip)" && $(BIN)/transcribe --quiet "$$clip"

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest

test-slow: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m slow

cluster: $(INSTALLED_DEV)
	$(PIP_INSTALL) ray
	$(BIN)/python -m pytest -m cluster

parity-nemo: $(INSTALLED_DEV)
	$(PYTHON) -m venv .venv-nemo
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$(.venv-nemo/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth
	.venv-nemo/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r scripts/record_nemo.txt
	.venv-nemo/bin/python scripts/record_nemo.py tests/data/nemo
	$(BIN)/python -m pytest tests/parity/test_citrinet.py

check: $(INSTALLED_DEV)
	$(BIN)/ruff check
	$(BIN)/mypy

speed: $(INSTALLED)
	@$(BIN)/python scripts/speed.py $(ARGS) $$($(CLIP) beckett.wav) $$($(CLIP) two_cities.wav)

kernel-speed: $(INSTALLED)
	@$(BIN)/python scripts/kernel_speed.py $(ARGS)

memory: $(INSTALLED)
	@$(BIN)/python scripts/memory.py $(ARGS) $$($(CLIP) two_cities.wav)

clean:
	rm -rf $(VENV) .venv-nemo build dist *.egg-info transcribe/kernels/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "making an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(SOURCES) | $(BIN)/python
	@echo "installing transcribe and the default model's package (PyTorch alone is some gigabytes: minutes, once)"
	@$(PIP_INSTALL) -e '.[default-model]'
	@touch $@

$(INSTALLED_DEV): $(SOURCES) | $(BIN)/python
	@echo "installing transcribe and what its tests need (PyTorch alone is some gigabytes: minutes, once)"
	@$(PIP_INSTALL) -e '.[default-model,test,dev]'
	@touch $(INSTALLED) $@
