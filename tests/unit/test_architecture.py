"""Rules for the modules of the package, its types and ARCHITECTURE.md."""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Required, get_args, get_origin, get_type_hints

import pytest
from celery import _state

import celery_native_delay
from celery_native_delay.settings import DelaySettings, InstallKeywords, setting_names

PACKAGE = Path(celery_native_delay.__file__).parent
ROOT = Path(__file__).parents[2]

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_every_module_has_a_docstring() -> None:
    texts = {module: (PACKAGE / module).read_text() for module in MODULES}
    assert [name for name, text in texts.items() if not text.startswith(('"""', "``", "#"))] == []


def test_the_doctests_of_the_package_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # They make an app current; the tests after this one must not meet it.
    monkeypatch.setattr(_state._tls, "current_app", None, raising=False)
    results = doctest.testmod(celery_native_delay)
    assert results.attempted >= 3
    assert results.failed == 0


CONSUMER = ROOT / "tests/typing/consumer.py"


def test_a_consumer_passes_mypy_strict(tmp_path: Path) -> None:
    """mypy runs in another folder, without our configuration."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file="]
    command += ["--allow-subclassing-any", "--disable-error-code=import-untyped", str(CONSUMER)]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr


@pytest.mark.ci
def test_a_consumer_passes_pyright(tmp_path: Path) -> None:
    """It refuses the lines that mypy refuses."""
    (tmp_path / "consumer.py").symlink_to(CONSUMER)
    configuration = {"include": ["consumer.py"], "reportUnnecessaryTypeIgnoreComment": "error"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "\n0 errors" in f"\n{checked.stdout}", checked.stdout + checked.stderr


def test_the_types_of_keywords_are_those_of_the_settings() -> None:
    """Type checkers read a dict, because they cannot read the keywords off a dataclass."""
    found, taken = get_type_hints(DelaySettings), get_type_hints(InstallKeywords)
    assert list(taken) == setting_names()
    for name, kind in taken.items():
        wanted = {found[name], *get_args(found[name])}
        assert kind in wanted or found[name] in get_args(kind), name


def test_the_types_of_keywords_are_those_of_a_fan_outs_options() -> None:
    options = pytest.importorskip("celery_native_delay.spark.options")
    kinds = get_type_hints(options.FanOutOptions)
    assert get_type_hints(options.FanOutKeywords) == kinds
    marked = get_type_hints(options.FanOutKeywords, include_extras=True)
    required = {name for name, kind in marked.items() if get_origin(kind) is Required}
    missing = (field.name for field in fields(options.FanOutOptions) if not has_default(field))
    assert required == set(missing)


def has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def test_every_path_in_the_architecture_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = re.findall(r"`([\w/.]+(?:\.py|/))`", text)
    rooms = (ROOT, PACKAGE, PACKAGE / "transports")
    assert len(names) > 20
    assert [name for name in names if not any((room / name).exists() for room in rooms)] == []


def test_the_architecture_names_every_subpackage() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if f"`{room}/`" not in text] == []


# ---- soft time limits ----------------------------------------------------------------------

#: Modules whose broad handlers run in a thread of this package, in the main process of a worker,
#: in a command, in Spark or in a test: no task runs there.
NEVER_IN_A_TASK = (
    "app/doctor.py",
    "cli/",
    "clock/",
    "flower/",
    "metrics/",
    "spark/",
    "testing/",
    "transports/redis/promoter.py",
    "transports/sqs/relay.py",
    "worker/attendant.py",
    "worker/bootsteps.py",
    "worker/holding.py",
    "worker/once.py",
    "worker/rating.py",
    "worker/gates.py",
    "worker/scheduling.py",
    "worker/strategies.py",
    "worker/unique.py",
)

#: Functions of other modules that run in a thread of this package.
IN_A_THREAD = ("_send_in_time", "_renew_all", "put_back", "_step")


def in_tasks(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module, without the functions that no task runs."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name in IN_A_THREAD):
            yield from in_tasks(node)


def swallowing() -> Iterator[str]:
    """Places that handle every Exception, and do not let SoftTimeLimitExceeded through."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(NEVER_IN_A_TASK):
            continue
        for node in in_tasks(ast.parse(path.read_text())):
            if isinstance(node, ast.Try):
                let_through = "SoftTimeLimitExceeded" in "".join(map(ast.unparse, node.handlers))
                for handler in node.handlers:
                    broad = handler.type is None or ast.unparse(handler.type) == "Exception"
                    raises = isinstance(handler.body[-1], ast.Raise) and not handler.body[-1].exc
                    if broad and not let_through and not raises:
                        yield f"{name}:{handler.lineno}"
            elif isinstance(node, ast.Call) and ast.unparse(node) == "suppress(Exception)":
                yield f"{name}:{node.lineno}"


def test_no_handler_of_all_errors_takes_the_soft_time_limit_of_a_task() -> None:
    """Put ``except SoftTimeLimitExceeded: raise`` before it, or use ``errors_ignored()``."""
    assert list(swallowing()) == []
