# `make test` and `make demo` start from nothing but Python 3.11: they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint types check demo benchmarks clean

$(STAMP): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[test]'
	touch $(STAMP)

test: lint types check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy sees the package as it is installed: built into a wheel, unpacked aside, checked from an empty folder.
types: $(STAMP)
	rm -rf $(VENV)/wheel $(VENV)/site build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w $(VENV)/wheel .
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/site $(VENV)/wheel/*.whl
	rm -rf build
	cd $(VENV)/wheel && MYPYPATH=../site ../bin/mypy --config-file ../../setup.cfg -p quotientsharp
	cd $(VENV)/wheel && PYTHONPATH=../site ../bin/python -W ignore -c "import quotientsharp.manifolds as m; assert '/site/' in m.__file__"

# One thread per worker: the matrices are small, and two workers use both cores.
check: $(STAMP)
	@start=$$(date +%s); OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --durations=5; status=$$?; \
	echo "the suite took $$(( $$(date +%s) - start )) s"; exit $$status

demo: $(STAMP)
	$(BIN)/quotientsharp demo --out demo

benchmarks: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build demo *.egg-info
