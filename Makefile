# make demo   sets up .venv and writes a video           make test   sets up .venv and runs the tests
# make lint   style and types                            make test-oldest   the core tests on the oldest JAX supported
PYTHON ?= python3
VENV ?= .venv
OLD_VENV ?= .venv-oldest
OUT ?= outputs/demo.mp4
PROMPT ?= a red circle moving right on a blue background
THEN ?= a red circle moving down fast on a blue background
CORE_TESTS = tests/nki_ops tests/parallel tests/dit tests/rolling tests/text tests/vae tests/weights/test_convert.py tests/test_pipeline.py tests/test_device_rules.py tests/test_lint_cli.py

.PHONY: demo test lint test-oldest clean

demo: $(VENV)/.run
	mkdir -p $(dir $(OUT))
	$(VENV)/bin/rfjax stream "$(PROMPT)" --num-frames 321 --prompt-at "160:$(THEN)" --seed 3 -o $(OUT) --force

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

test-oldest: $(OLD_VENV)/.dev
	$(OLD_VENV)/bin/python -m pytest $(CORE_TESTS)

checkpoints/tiny: $(VENV)/.run
	$(VENV)/bin/rfjax convert tests/golden/tiny_a checkpoints/tiny --dtype float32

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(OLD_VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python -m pip install --quiet --editable ".[dev]" jax==0.7.0 jaxlib==0.7.0
	touch $@

clean:
	rm -rf $(VENV) $(OLD_VENV) outputs checkpoints/tiny
