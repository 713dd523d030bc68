# What a person does with this repository, one target each; `make` alone lists them.
#
#   VENV=      use the machine's own Python and torch instead of a virtual environment; VENV=PATH puts it elsewhere
#   PYTHON=    the Python to start from (3.11 or later)
#   TORCH=     another torch than pip would choose, e.g. TORCH=torch==2.12.0
#   RECIPE=    train: a name in recipes/ or a path to a TOML file; compare: the name that two twins share
#   NGPU=      processes on this machine, one a GPU
#   ARGS=      more arguments for the command that the target runs

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV ?= .venv
PYTHON ?= python3
NGPU ?= 1
TORCH ?=
ARGS ?=
WORKERS ?= 2

PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check
COMPARE_DIR = outputs/compare

ifneq ($(VENV),)
PY := python
STAMPS := $(VENV)
export PATH := $(abspath $(VENV))/bin:$(PATH)
else
PY := $(PYTHON)
STAMPS := .make
# Stamps lie in the checkout here: they count only while the package is really installed (-P: not from this folder).
ifeq ($(shell $(PY) -P -c "import importlib.metadata as m; print(m.version('titan-moe-fp8'))" 2>/dev/null),)
REINSTALL := always
endif
endif
ifneq ($(TORCH),)
REINSTALL := always
endif

# recipes/NAME.toml for a bare name; a path stays what it is.
recipe_path = $(if $(findstring /,$(1))$(filter %.toml,$(1)),$(1),recipes/$(1).toml)
# The common stem of two twins, from the stem itself or from either file.
twin_path = $(patsubst %_bf16,%,$(patsubst %_fp8,%,$(patsubst %.toml,%,$(call recipe_path,$(1)))))

.PHONY: help train test compare bench converters clean always

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@sed -n '/^#   /s/^#//p' $(firstword $(MAKEFILE_LIST))

train: RECIPE ?= llama4_fp8
train: $(STAMPS)/installed-train ## install and train a recipe (RECIPE=llama4_fp8)
	torchrun --nproc_per_node=$(NGPU) train.py --job.config_file $(call recipe_path,$(RECIPE)) $(ARGS)

test: $(STAMPS)/installed-dev ## install with the development extra, lint, run the tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

compare: RECIPE ?= llama4
compare: TWIN = $(call twin_path,$(RECIPE))
compare: RUN = $(COMPARE_DIR)/$(notdir $(TWIN))
compare: $(STAMPS)/installed-train ## train a recipe in BF16 and in FP8 and compare the curves (RECIPE=llama4)
	rm -rf $(RUN)_bf16 $(RUN)_fp8 # a checkpoint left there would be resumed
	torchrun --nproc_per_node=$(NGPU) train.py --job.config_file $(TWIN)_bf16.toml --job.dump_folder $(RUN)_bf16 $(ARGS)
	torchrun --nproc_per_node=$(NGPU) train.py --job.config_file $(TWIN)_fp8.toml --job.dump_folder $(RUN)_fp8 $(ARGS)
	$(PY) -m recipes.compare $(RUN)_bf16 $(RUN)_fp8 --max-val-gap 0.02 --html $(RUN).html

bench: $(STAMPS)/installed-train ## time the expert MLP against BF16 and torchao
	$(PY) -m recipes.bench $(ARGS)

converters: $(STAMPS)/installed-train ## list the model converters that this Python has
	@$(PY) -m converters $(ARGS)

clean: ## remove .venv, build outputs and caches; outputs/ stays
	rm -rf .venv .make build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Installs are repeated only when pyproject.toml is newer than the stamp.
$(STAMPS)/installed-train: pyproject.toml $(REINSTALL) | environment
	$(PIP_INSTALL) $(CONSTRAINT) $(TORCH) -e .
	touch $@

$(STAMPS)/installed-dev: pyproject.toml $(REINSTALL) | environment
	$(PIP_INSTALL) $(CONSTRAINT) $(TORCH) -e ".[dev]"
	touch $(STAMPS)/installed-train $@

.PHONY: environment
ifneq ($(VENV),)
environment: $(VENV)/bin/pip

$(VENV)/bin/pip:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('titan-moe-fp8 needs Python 3.11 or later and $(PYTHON) is %d.%d: make PYTHON=python3.11' % sys.version_info[:2])"
	$(PYTHON) -m venv $(VENV)
else
# The machine's torch is never replaced: pip is told its exact version and stops when that cannot be.
CONSTRAINT = -c .make/constraints.txt
environment:
	@mkdir -p .make
	@$(PY) -P -c "import importlib.metadata as m; print(next(('torch==' + d.version for d in m.distributions(name='torch')), ''))" > .make/constraints.txt
endif
