# Everything a contributor runs. `make` alone lists it.

PYTHON3 ?= python3
VENV    := .venv
PYTHON  := $(VENV)/bin/python

# Most tests wait, so there is time for more of them than there are cores.
TEST_PROCESSES ?= 5

.DEFAULT_GOAL := help
.PHONY: help venv brokers test check docs bench demo demo-spark public-suites clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.complete ## create .venv with the package and the pinned development set

$(VENV)/.complete: pyproject.toml constraints.txt
	@$(PYTHON3) -c 'import ensurepip' 2>/dev/null || scripts/install_packages.sh python3-venv
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	@touch $@

brokers: ## install RabbitMQ, Redis and PostgreSQL for the tests; for 4.3, too: NATIVE_DELAY_TEST_43=1
	scripts/setup_brokers.sh

# At home a broker (or a Java, a Chromium) that cannot be installed is a reason to skip its tests, in CI to fail.
test: venv ## run all tests on private brokers, after installing what they need
	@scripts/setup_brokers.sh || [ "$$CI" != true ]
	@scripts/setup_spark.sh || [ "$$CI" != true ]
	@[ "$$CI" != true ] || command -v promtool >/dev/null || scripts/install_packages.sh prometheus
	@scripts/setup_browser.sh || [ "$$CI" != true ]
	$(PYTHON) -m pytest --numprocesses=$(TEST_PROCESSES) \
		$(wildcard tests/unit tests/conformance tests/integration tests/acceptance tests/spark)

check: venv ## lint, format, types and the direction of imports
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict celery_native_delay pytest_celery_native_delay.py \
		pyspark_celery_native_delay.py
	$(VENV)/bin/lint-imports

docs: venv ## build the site into docs/_build/html, every warning an error
	@$(PYTHON) -c 'import furo, myst_parser, sphinx_click, sphinx_copybutton' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet --editable '.[dev,docs]' --constraint constraints.txt
	$(PYTHON) -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

bench: venv ## compare with worker-held ETA, Celery's own delayed delivery and BullMQ
	@scripts/setup_brokers.sh --with-4.3 || scripts/setup_brokers.sh
	@scripts/setup_spark.sh
	$(PYTHON) -m benchmarks

# BROKER is rabbitmq, embedded, filesystem, sqs or a url; see example_project/demo_broker.py.
demo: venv ## show delayed tasks wait in the broker and run on time; BROKER=filesystem without any
	@case '$(BROKER)' in ''|rabbitmq) scripts/setup_brokers.sh --rabbitmq || true ;; esac
	$(PYTHON) -m example_project.demo '$(BROKER)'

demo-spark: venv ## remind a day's customers from local Spark, and prove that each task ran
	@scripts/setup_spark.sh
	@case '$(BROKER)' in ''|rabbitmq) scripts/setup_brokers.sh --rabbitmq ;; esac
	$(PYTHON) -m example_project.spark_demo '$(BROKER)'

public-suites: venv ## run kombu's and Celery's own tests with our transport
	@scripts/setup_brokers.sh --rabbitmq
	$(PYTHON) scripts/public_suites.py

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
