# make quickstart   set up .venv and train NLAC on the help desk
# make test         set up .venv with the test tools, then lint, types and tests
# make clean        remove what the two made, downloaded models excepted
#
# PYTHON=python3.12 chooses the interpreter that .venv is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test clean

quickstart: $(VENV)/.installed
	$(BIN)/nlac fit --config configs/quickstart.yaml

test: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile

# the tools follow the project, so that an edit of pyproject.toml refreshes both
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing nlac-lightning into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(BIN)/python:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "There is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "'$(PYTHON)' is older than Python 3.11. Name a newer one: make PYTHON=/path/to/python3" >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
