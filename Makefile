# Everything a contributor runs. `make` alone lists it.

PYTHON3 ?= python3
VENV    := .venv
PYTHON  := $(VENV)/bin/python

# Most tests wait, so there is time for more of them than there are cores.
TEST_PROCESSES ?= 5

TESTS := $(wildcard tests/unit tests/conformance tests/integration tests/acceptance tests/spark)

# At home what users rely on every day is tested, Spark's part by a target of its own; CI, or any
# run with CI=true, adds what is marked.
ifeq ($(CI),true)
AND_ALONE := || scripts/test_alone.sh $$?
CHOSEN := not tools
else
NOT_AT_HOME := ci$(if $(NATIVE_DELAY_TEST_43),, or rabbitmq43)
CHOSEN := not ($(NOT_AT_HOME) or spark or tools)
endif

# What the demo needs, which is a tenth of the development set.
DEMO_SET := '.[embedded,sql]' rich
DEMO_SET_sqs := '.[sqs]' rich moto flask flask-cors

# Else each of some five hundred processes that the tests start compiles all modules for itself.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv brokers test test-spark test-fast test-tools check docs bench chaos demo demo-broker demo-spark public-suites clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.complete ## create .venv with the package and the pinned development set

$(VENV)/.complete: pyproject.toml constraints.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

$(VENV)/.demo $(VENV)/.demo-sqs: pyproject.toml constraints.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt \
		--editable $(DEMO_SET$(subst -,_,$(@:$(VENV)/.demo%=%)))
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --editable '.[docs]' --constraint constraints.txt
	@touch $@

$(PYTHON):
	@$(PYTHON3) -c 'import ensurepip' 2>/dev/null || scripts/install_packages.sh python3-venv
	$(PYTHON3) -m venv $(VENV)

brokers: ## install RabbitMQ, Redis, PostgreSQL and MariaDB for the tests; for 4.3, too: NATIVE_DELAY_TEST_43=1
	scripts/setup_brokers.sh --all

# At home a broker (or a Java, a Chromium) that cannot be installed is a reason to skip its tests, in CI to fail.
test: venv ## run what users rely on every day, on private brokers; all of it with CI=true, as CI does
ifeq ($(CI),true)
	@scripts/setup_brokers.sh --all
	@scripts/setup_spark.sh
	@command -v promtool >/dev/null || scripts/install_packages.sh prometheus
	@scripts/setup_browser.sh
else
	@scripts/setup_brokers.sh || true
endif
	$(PYTHON) -m pytest --numprocesses=$(TEST_PROCESSES) -m '$(CHOSEN)' $(TESTS) $(AND_ALONE)

test-spark: venv ## run the promises of Spark, on a local one
	@scripts/setup_spark.sh
	@scripts/setup_brokers.sh || true
	$(PYTHON) -m pytest $(if $(NOT_AT_HOME),-m 'not ($(NOT_AT_HOME))') tests/spark

test-fast: venv ## run the unit tests, and the conformance suite on a folder: no broker, under a minute
	$(PYTHON) -m pytest --numprocesses=$(TEST_PROCESSES) \
		-m 'not (ci or redis or rabbitmq or rabbitmq43 or tools)' tests/unit tests/conformance

test-tools: venv ## run the tests of make chaos, make bench, the scripts and the pictures of the docs
	@scripts/setup_brokers.sh || true
	$(PYTHON) -m pytest --numprocesses=$(TEST_PROCESSES) -m tools $(TESTS)

check: venv ## lint, format, types, the direction of imports, and plain words
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict celery_native_delay pytest_celery_native_delay.py \
		pyspark_celery_native_delay.py
	$(VENV)/bin/lint-imports
	$(PYTHON) -m pytest --quiet tests/unit/test_words.py

docs: $(VENV)/.docs ## build the site into docs/_build/html, every warning an error
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

bench: venv ## compare with worker-held ETA and Celery's own delayed delivery
	@scripts/setup_brokers.sh --with-4.3 || scripts/setup_brokers.sh --all
	@scripts/setup_spark.sh
	$(PYTHON) -m benchmarks

# CHAOS is the options of `python -m tests.chaos`, such as "--broker redis --minutes 2 --seed 7".
chaos: venv ## delay tasks while brokers, workers and producers fail, and tell of each; CHAOS='--minutes 2'
	@scripts/setup_brokers.sh --with-4.3 || scripts/setup_brokers.sh --all
	$(PYTHON) -m tests.chaos $(CHAOS)

# BROKER is rabbitmq, embedded, filesystem, sqs or a url; see example_project/demo_broker.py.
demo: ## show delayed tasks wait in the broker and run on time; BROKER=filesystem without any
	@$(MAKE) --no-print-directory --jobs=2 demo-broker $(if $(wildcard $(VENV)/.complete),venv,\
		$(VENV)/.demo$(if $(filter sqs,$(BROKER)),-sqs))
	$(PYTHON) -m example_project.demo '$(BROKER)'

demo-broker:
	@case '$(BROKER)' in ''|rabbitmq) scripts/setup_brokers.sh --rabbitmq || true ;; esac

demo-spark: venv ## remind a day's customers from local Spark, and prove that each task ran
	@scripts/setup_spark.sh
	@case '$(BROKER)' in ''|rabbitmq) scripts/setup_brokers.sh --rabbitmq ;; esac
	$(PYTHON) -m example_project.spark_demo '$(BROKER)'

# SUITES is the options of scripts/public_suites.py, such as "--only flower".
public-suites: venv ## run the tests of Celery, kombu, Flower and others, without us and with us
	@scripts/setup_brokers.sh
	$(PYTHON) scripts/public_suites.py $(SUITES)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
