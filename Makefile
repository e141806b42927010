# Two commands matter: `make chat` and `make test`. Both install what they need, once.

VENV = .venv
OPTIMUM = .venv-optimum
INSTALL = -m pip install --quiet --disable-pip-version-check
TINY = build/tiny-bundle
MODEL = smollm2-135m
PROMPTS = ../shared/prompts/specbench-dev.jsonl
ARGS =
PROMPT =
# Taken as typed: a prompt may hold dollar signs.
override PROMPT := $(value PROMPT)
export PROMPT
export PYTHON

.PHONY: help chat bench test deadlines long lint types test-main test-optimum test-pythons clean
.NOTPARALLEL:

help:
	@echo 'make chat                 chat with the built-in model, speculatively'
	@echo 'make chat PROMPT="..."    answer once; ARGS="--stats" and the like go to specedge chat'
	@echo 'make test                 the whole suite (make lint, types, test-main, test-optimum, test-pythons: its parts)'
	@echo 'make bench                every method against plain decoding; PROMPTS=FILE.jsonl, ARGS="--limit 2"'
	@echo 'make long                 tests that take more than the suite may: a quarter of an hour; make deadlines: one of them'
	@echo 'make deadlines            500 replies with deadlines on a machine that is busy: ten minutes'
	@echo 'make clean                remove what the above made here'

chat: $(VENV)/.chat
	@if [ -n "$$PROMPT" ]; then exec $(VENV)/bin/specedge chat $(ARGS) -- $(MODEL) "$$PROMPT"; \
	else exec $(VENV)/bin/specedge chat $(ARGS) $(MODEL); fi

bench: build/$(MODEL)/specedge.json
	$(VENV)/bin/specedge bench --prompts $(PROMPTS) $(ARGS) build/$(MODEL)

build/$(MODEL)/specedge.json: $(VENV)/.chat $(wildcard export/*.py models/*.py quant/*.py)
	$(VENV)/bin/specedge export $(MODEL) -o build/$(MODEL) --force

test: lint types test-main test-optimum test-pythons

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(VENV)/.test
	sh .ci/check-types $(VENV)/bin/python

test-main: $(VENV)/.test
	SPECEDGE_TINY_BUNDLE=$(TINY) $(VENV)/bin/python -m pytest -m "not optimum and not long"

# 500 requests with random deadlines while another process works: ten minutes.
deadlines: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m long -s tests/test_deadlines.py

long: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m long -s

test-optimum: $(OPTIMUM)/.test
	$(OPTIMUM)/bin/python -m pytest -m "(optimum or both) and not long"

# test-main leaves a small bundle for these: an environment like a device's cannot export one.
test-pythons:
	SPECEDGE_TINY_BUNDLE=$(TINY) sh .ci/test-runtime 3.10
	SPECEDGE_TINY_BUNDLE=$(TINY) sh .ci/test-runtime 3.13

# Stamps: an environment is installed anew when pyproject.toml changes.
$(VENV)/bin/python:
	@python=$$(sh .ci/find-python 3.11) && "$$python" -m venv --clear $(VENV)

$(VENV)/.chat: pyproject.toml $(VENV)/bin/python
	@echo 'Installing .[cpu,export] into $(VENV): about 70 MB, once'
	@$(VENV)/bin/python $(INSTALL) -e '.[cpu,export]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/bin/python
	@echo 'Installing .[cpu,export,plot,train,test,dev] into $(VENV)'
	@$(VENV)/bin/python $(INSTALL) -e '.[cpu,export,plot,train,test,dev]'
	@touch $(VENV)/.chat $@

$(OPTIMUM)/.test: pyproject.toml
	@echo 'Installing .[cpu,export,optimum,test] and onnxruntime-genai into $(OPTIMUM)'
	@python=$$(sh .ci/find-python 3.11) && "$$python" -m venv --clear $(OPTIMUM)
	@$(OPTIMUM)/bin/python $(INSTALL) -e '.[cpu,export,optimum,test]' onnxruntime-genai accelerate
	@touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
