# The commands of the project; `make` lists them. Settings that change results live in config/, never here.

# The one address in this project: PyTorch's index of CPU wheels. Asked only where pip does not find that wheel itself.
export TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Which environment `env` builds beside the workflow's own: cpu, or cuda on machines with GPUs.
ENV := cpu

# `test-all` runs these folders of tests/ one after the other, each in a process of its own (engines free their memory).
TEST_GROUPS := unit contract workflow slurm versions demo

WORKFLOW := .venvs/workflow/bin
CPU := .venvs/cpu/bin
SNAKEMAKE := PATH="$(CURDIR)/$(WORKFLOW):$$PATH" snakemake
PYTEST := EAGLE3_ENV=cpu $(CPU)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help env demo restore-production test quick-unit quick-engine test-all older-engine format lint lock clean-env

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | expand -t 20

env: ## build the environments: workflow and cpu (ENV=cuda: workflow and cuda)
	@envs/install.sh workflow
	@envs/install.sh $(ENV)

demo: env ## the whole pipeline with a small real model, on CPU
	EAGLE3_ENV=$(ENV) $(SNAKEMAKE) --cores all

restore-production: ## after a run was killed: start the production server again, clear the lock
	$(WORKFLOW)/python -m scripts.restore_production

test: env ## all tests but the slow ones, on CPU: unit tests beside those with an engine, which leave a core idle
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target quick-unit quick-engine

quick-unit:
	$(PYTEST) -m "not slow and not gpu" tests/unit
quick-engine:
	$(PYTEST) -m "not slow and not gpu" tests/contract tests/workflow

test-all: $(TEST_GROUPS:%=test-%) ## every test, group by group (-k: go on after a failing group)

test-versions: older-engine

older-engine: ## the environment with the previous vLLM release, for test-versions
	@envs/install.sh cpu-vllm-0.31

test-%: env ## every test of one group: unit, contract, workflow, slurm, versions, demo
	$(PYTEST) -m "not gpu" tests/$*

format: env ## rewrite Snakemake and Python files in the project's format
	$(WORKFLOW)/snakefmt Snakefile rules
	$(CPU)/ruff check --fix .
	$(CPU)/ruff format .

lint: env ## formats, style, types, conda files against locks, and Snakemake's own lint
	$(WORKFLOW)/snakefmt --check Snakefile rules
	$(CPU)/ruff check .
	$(CPU)/ruff format --check .
	$(CPU)/mypy scripts benchmarks
	$(CPU)/python envs/conda_yaml.py --check
	$(SNAKEMAKE) --lint

lock: ## resolve envs/*.in to envs/*.lock and envs/*.yaml
	@envs/lock.sh

clean-env: ## remove the environments of this checkout (and the cached copies they link to)
	@for link in .venvs/*; do [ ! -L "$$link" ] || rm -rf "$$(readlink "$$link")"; done
	rm -rf .venvs
