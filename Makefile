# make up [ENGINE=vllm|fake] [INSTANCES=2] [MODEL=name-or-path] [PORT=8000] [REDIS=redis://...]
# make test | check | format | clean

ENGINE ?= vllm
INSTANCES ?= 2
MODEL ?=
PORT ?= 8000
REDIS ?=

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# One set of packages for the fake engine, one for vLLM on this machine; all of them share one environment.
FULL := $(if $(wildcard /dev/nvidia0),gpu,cpu)
KIND := $(if $(filter fake,$(ENGINE)),light,$(FULL))

.PHONY: up install test check format clean
.DEFAULT_GOAL := up

up: $(VENV)/.installed-$(KIND)
	@exec $(BIN)/python -m deploy.cli up --engine $(ENGINE) --instances $(INSTANCES) --port $(PORT) \
		$(if $(MODEL),--model $(MODEL)) $(if $(REDIS),--redis $(REDIS))

install: $(VENV)/.installed-$(KIND)

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.installed-$(FULL)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-$(FULL)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m deploy.env_example

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Making the environment $(VENV) with $(PYTHON)."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/it ...")'
	$(PYTHON) -m venv $(VENV)

# Dates only say that it is time to look; deploy/install.py compares what is installed and mostly finds nothing to do.
$(VENV)/.installed-light: requirements/light.txt pyproject.toml | $(BIN)/python
	@$(BIN)/python deploy/install.py light

$(VENV)/.installed-cpu: requirements/cpu.txt pyproject.toml | $(BIN)/python
	@$(BIN)/python deploy/install.py cpu

$(VENV)/.installed-gpu: pyproject.toml | $(BIN)/python
	@$(BIN)/python deploy/install.py gpu
