# Every target does its own set-up in a virtual environment. VENV=... names another: what it has, torch too, is kept.
VENV ?= .venv
MODEL ?= vgg16
GPUS ?= 16
PYTHON ?= python3
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install -q
# Beside the environment, as no other command needs them; without their own needs, which contradict each other.
ZOO = diffusers dynamic-network-architectures monai segmentation-models-pytorch timm torchvision

.PHONY: search test lint bench zoo notebooks pages docs clean

search: $(VENV)/.installed  ## the best strategy: make search MODEL=resnet50 GPUS=64 ARGS="--profile p100"
	$(VENV)/bin/python -m layerwise.search $(MODEL) --gpus $(GPUS) $(ARGS)

test: $(VENV)/.installed-dev  ## all tests, on all cores; ARGS="-m slow" for the long ones, ARGS="-n 0" for one process
	$(VENV)/bin/python -m pytest -n auto --dist loadfile $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

notebooks: $(VENV)/.installed-dev  ## run every notebook; `make docs` shows what they gave
	mkdir -p build/notebooks
	cp notebooks/*.ipynb build/notebooks
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q --nbmake --overwrite --nbmake-timeout=240 build/notebooks

pages: $(VENV)/.installed-docs  ## write the commands' help and the public names' docstrings into docs/reference
	$(VENV)/bin/python -m docs.pages $(ARGS)

docs: $(VENV)/.installed-docs  ## the documentation, into site/; `make notebooks docs` for the tutorials' pictures
	$(VENV)/bin/python -m docs.pages --check
	$(VENV)/bin/mkdocs build --strict $(ARGS)

bench: $(VENV)/.installed-dev  ## search and table times, as in docs/benchmarks
	$(VENV)/bin/python -m benchmarks.planner $(ARGS)

zoo: $(VENV)/.installed-zoo  ## published networks at the first try; ARGS="--small" for few
	PYTHONPATH=$(VENV)/zoo $(VENV)/bin/python -m benchmarks.zoo $(ARGS)

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV): where it has no PyTorch, pip fetches it, which may take minutes" >&2
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[data]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[data,dev,notebooks,volumes]'
	touch $@

$(VENV)/.installed-zoo: $(VENV)/.installed
	$(PIP) -e '.[data,zoo]'
	$(PIP) --no-deps --target $(VENV)/zoo $(ZOO)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

clean: # never VENV: it may be somebody's own
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
