# make demo: compile a trained sentence encoder to NVFP4.   make test: run the tests.
# make quick: those that are not marked slow.   make lint: ruff and mypy.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test quick lint clean

demo: $(VENV)/demo.installed
	$(RUN) examples/embed_sentences.py

test: $(VENV)/test.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

quick: $(VENV)/test.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal -m "not slow"

lint: $(VENV)/test.installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) demo_dump

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.installed: EXTRAS := examples
$(VENV)/test.installed: EXTRAS := test,examples
$(VENV)/%.installed: pyproject.toml | $(VENV)/created
	@echo "installing fp4_compile[$(EXTRAS)] into $(VENV); torch is a large download"
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@
