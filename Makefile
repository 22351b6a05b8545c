# Two commands: `make report` (the main job) and `make test` (everything that must pass).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: report test install install-test browser lint types unit clean

report: install
	$(BIN)/headstream report induction-2l -o report.html --force
	@echo "open $(CURDIR)/report.html"

test: install-test browser lint types unit

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "headstream needs Python 3.11 or newer; set PYTHON=... ($$($(PYTHON) --version) found)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

# Debian's chromium opens the reports; without it the browser tests are skipped, and say so.
browser:
	@sh tests/browser/ensure_chromium.sh

lint: install-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Type checkers cannot follow the editable install's import finder: check an installed copy.
types: install-test
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
	  rm -rf build && $(PIP) install --quiet --no-deps --target "$$copy" . && rm -rf build && \
	  cd "$$copy" && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
	    --cache-dir "$(CURDIR)/.mypy_cache" -p headstream

unit: install-test
	$(BIN)/python -m pytest -q -rs --durations=10

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis report.html
