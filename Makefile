# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint types imports pytest docs coverage check-install format lock clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: lint types imports pytest

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/basedpyright

imports: .venv/ready
	$(BIN)/lint-imports

# Two tests at a time: a training or a deployment takes a core of its own.
pytest: .venv/ready
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# The documentation site, in docs/_build/html. It works offline, its search too.
docs: .venv/ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs/*.md docs/adr
	@echo "open docs/_build/html/index.html"

# Which lines of src the tests run, as a table and in out/coverage; slower than `make test`.
coverage: .venv/ready
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --cov=dpftrl --cov-report=term --cov-report=html:out/coverage

# The wheel in clean environments: the base and the light extras; `--all` tries every extra.
check-install: .venv/ready
	$(BIN)/python scripts/clean_install.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The lock pins every package with its hashes, for all platforms and Pythons we support. PyTorch is
# not in it: which build is installed, and so its hash, depends on the machine (CPU or GPU).
EXTRAS := --extra audit --extra dp-accounting --extra flower --extra jax --extra logs --extra metrics --extra plot --extra train --extra web
lock:
	uv pip compile pyproject.toml $(EXTRAS) --group dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-annotate --no-header --upgrade -o requirements.lock

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("dpftrl needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps opacus==1.6.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf .venv out build dist docs/_build docs/api .pytest_cache .ruff_cache .hypothesis
