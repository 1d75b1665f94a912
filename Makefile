# `make quickstart` and `make test` need nothing but Python 3.11 or newer: each first makes .venv itself.
.DEFAULT_GOAL := help
.PHONY: help install quickstart offline test test-fast soak audit check bench bench-peers docs schemas lock clean

BIN := .venv/bin
# Two workers more than cores, because tests wait for processes, and five at most; each takes whole files. One process: make test ARGS="-n 0".
WORKERS := -n $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 2 : 5))) --dist loadfile --no-loadscope-reorder
# Without its bytecode vLLM takes twice as long to start, each time.
unexport PYTHONDONTWRITEBYTECODE

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile

install: ## .venv with the locked versions (on a CPU; for a GPU: uv sync --extra vllm --extra train)
	@python=$$(scripts/find-python) && "$$python" scripts/install.py

quickstart: install ## Train a tiny policy, serve it, collect scored rollouts
	@$(BIN)/ng_quickstart $(ARGS)

offline: install ## Preference pairs and DPO from finished rollouts
	@$(BIN)/python -m ngym.cli.offline $(ARGS)

test: install ## All tests except soak; a selection: make test ARGS="-k schema"
	@$(BIN)/pytest $(WORKERS) $(ARGS)

test-fast: install ## Unit tests without processes and sockets
	@$(BIN)/pytest $(WORKERS) tests/unit -m "not process and not soak" $(ARGS)

soak: install ## Tests that take minutes: kills, full disks, hanging ranks
	@$(BIN)/pytest -m soak $(ARGS)

audit: install ## Known vulnerabilities of the locked versions (asks pypi.org)
	@for lock in locks/core.txt locks/cpu.txt; do $(BIN)/uvx pip-audit --strict --no-deps --disable-pip -r $$lock || exit; done

check: install ## Lint, format, types, import rules, prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/lint-imports
	@$(BIN)/pytest -q tests/unit/test_prose.py

bench: install ## Measure and write docs/benchmarks.md (15 minutes); a short run: make bench ARGS=--quick
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: install ## Measure beside NeMo Gym, TRL and vLLM's own server (25 minutes); a short run: ARGS=--quick
	@$(BIN)/python benchmarks/peers.py $(ARGS)

docs: install ## Build the documentation site in build/site; live preview: .venv/bin/mkdocs serve
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

schemas: install ## Write ngym/schemas: JSON Schemas of the config, of recipes and of rows
	$(BIN)/python scripts/schemas.py

lock: install ## Renew locks/ from pyproject.toml; the newest versions: make lock ARGS=--upgrade
	scripts/lock $(ARGS)

clean: ## Remove builds, caches and .venv
	rm -rf .venv .ngym build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
