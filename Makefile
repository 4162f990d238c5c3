# `make demo` and `make test` need only Python 3.11+ and git: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three stamps: the demo needs the package and Megatron-Core, the one with a real model also transformers and what reads
# GGUF files; tests and benchmarks also need their tools.
INSTALLED := $(VENV)/.installed
INSTALLED_PRETRAINED := $(VENV)/.installed-pretrained
INSTALLED_DEV := $(VENV)/.installed-dev
# Exported, so that it also holds in pip's isolated build environments: nothing may bring in another torch.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-pretrained test test-real soak masks lint bench docs constraints clean help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[megatron]'
	touch $@

$(INSTALLED_PRETRAINED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[hf,megatron]' accelerate gguf
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(INSTALLED) ## from generated chats to shards to a model: trained, stopped and resumed
	$(BIN)/python -m recipes.demo

demo-pretrained: $(INSTALLED_PRETRAINED) ## a real model: SmolLM2-135M fine-tuned with LoRA and with all weights, exported, asked
	$(BIN)/python -m recipes.demo_pretrained

# The tests of report pages run in a real Chromium. Where apt-get may install it, it is fetched once; elsewhere they are
# skipped with a reason. The package index may be old or missing, hence the update before a second try.
CHROMIUM := $(VENV)/.chromium
$(CHROMIUM): | $(INSTALLED_DEV)
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1 \
		&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "installing chromium for the tests of report pages"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get install --yes --quiet --no-install-recommends chromium >/dev/null 2>&1 \
		|| { apt-get update --quiet >/dev/null 2>&1; \
			apt-get install --yes --quiet --no-install-recommends chromium >/dev/null 2>&1; } \
		|| echo "chromium cannot be installed here; those tests are skipped"; \
	fi
	@touch $@

test: $(INSTALLED_DEV) $(CHROMIUM) lint ## lint, type-check and run every test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder  # a module's fixture is built once

test-real: $(INSTALLED_DEV) ## slow: every real chat of ../shared/data, with real tokenizers fetched by npm
	$(BIN)/python -m tests.real_data
	$(BIN)/python -m tests.remote.emulators
	PACKED_SFT_ALL_ROWS=1 $(BIN)/python -m pytest -n 2 tests/encode tests/records \
		tests/prepare/test_real_data.py tests/data/test_real_model.py tests/recipes/test_demo_pretrained.py \
		tests/remote/test_schemes.py

soak: $(INSTALLED_DEV) ## for an hour or so: the fuzzer of tests/attacks with new examples
	PACKED_SFT_FUZZ_EXAMPLES=100000 $(BIN)/python -m pytest -n 2 tests/attacks/test_fuzz.py

masks: $(INSTALLED_DEV) ## what is trained with real templates, family by family
	$(BIN)/python -m tests.encode.template_matrix
	$(BIN)/python -m tests.encode.held_out

lint: $(INSTALLED_DEV) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED_DEV) ## measure against the peers, all in one run
	$(BIN)/python -m benchmarks

docs: $(INSTALLED_DEV) ## the documentation as a site, in site/
	$(BIN)/python -m docs.site.pictures
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

constraints: ## write constraints.txt: the versions that are installed now, and what needs them
	$(BIN)/python -m tests.constraints

clean: ## remove everything the other targets made
	rm -rf $(VENV) build dist demo_output demo_pretrained_output site test_artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
