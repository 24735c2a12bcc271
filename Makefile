# Every target builds .venv when it is missing or when its inputs changed. `make` alone lists the targets.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test test-unit served-test lint lab bench clean

PARAMS ?= papermill_params/smollm2.yaml
LAB ?=
ONLY ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm

# A moved or copied checkout has an environment that points to the old place: build it again.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif
ifneq ($(shell cat $(VLLM)/.ready 2>/dev/null),$(CURDIR))
.PHONY: $(VLLM)/.ready
endif

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  PARAMS=FILE     parameter set for run and lab (default papermill_params/smollm2.yaml)"
	@echo "  ONLY=NAME       benchmark that bench runs, or a part of it: ONLY=training:8x256"
	@echo "  LAB=OPTIONS     options for jupyter lab, e.g. LAB='--no-browser --allow-root'"

run: $(READY) ## run the five notebooks on PARAMS; what is fresh is skipped
	$(BIN)/workbook fetch $(PARAMS)
	$(BIN)/workbook run $(PARAMS)

test: test-unit ## everything: unit tests, end to end, lint, committed pages
	$(BIN)/workbook fetch
	$(BIN)/python -m pytest -q -m slow
	$(BIN)/ruff check .
	$(BIN)/workbook check-rendered

test-unit: $(READY) ## unit tests alone (under three minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not served" -n 2 --dist loadfile

served-test: $(READY) $(VLLM)/.ready ## one draft here and in vLLM (in .venv-vllm, 2 GB): the same acceptance
	$(BIN)/workbook fetch
	WORKBOOK_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -q -m served tests/test_served.py

lint: $(READY) ## ruff over the package, the tests and the notebooks
	$(BIN)/ruff check .

lab: $(READY) ## JupyterLab on notebooks/; with PARAMS=FILE on copies with that set injected
ifeq ($(origin PARAMS),file)
	$(BIN)/jupyter lab $(LAB) notebooks
else
	folder="$$($(BIN)/workbook prepare $(PARAMS))" && $(BIN)/jupyter lab $(LAB) "$$folder"
endif

bench: $(READY) ## run the benchmarks: one table, benchmarks/results.json; ONLY=training runs one
	$(BIN)/python benchmarks/run.py $(ONLY)

clean: ## remove .venv, .venv-vllm and caches; data/ and rendered/ stay
	rm -rf $(VENV) $(VLLM) build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests notebooks benchmarks scripts \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): pyproject.toml constraints.txt
	@set -e; \
	for python in "$(PYTHON)" python3.11 python3 none; do \
	  if [ "$$python" = none ]; then echo "Python 3.11 or later is needed; python3 here: $$(python3 --version 2>&1)"; exit 1; fi; \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; done; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$python cannot make environments: install python3-venv (Debian: apt-get install python3-venv)"; exit 1; fi; \
	if [ "$$(cat $(READY) 2>/dev/null)" != "$(CURDIR)" ] || ! $(BIN)/python -c pass 2>/dev/null; then \
	  echo "building $(VENV) with $$("$$python" --version): about 3 minutes and 6.5 GB"; \
	  "$$python" -m venv --clear $(VENV); fi; \
	$(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e '.[dev]'; \
	$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (ipykernel)" \
	  --env PYTHONWARNINGS "ignore:IProgress not found" >/dev/null; \
	printf '%s' "$(CURDIR)" > $(READY)

$(VLLM)/.ready: scripts/vllm-requirements.txt scripts/vllm-environment.sh
	@sh scripts/vllm-environment.sh $(VLLM) $(BIN)/python
	@printf '%s' "$(CURDIR)" > $@
