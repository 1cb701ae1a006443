"""The documentation site: `make docs` builds it, every warning an error."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import celery_native_delay

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "celery_native_delay"
author = "the celery_native_delay authors"
project_copyright = "the celery_native_delay authors"
version = release = celery_native_delay.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "native_delay_docs",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"celery_native_delay {version}"
html_static_path = ["_static"]
html_css_files = ["native_delay.css"]
html_show_sphinx = False
pygments_dark_style = "github-dark"

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
#: Hundreds of megabytes, for some signatures.
autodoc_mock_imports = ["numpy", "pyarrow", "pyspark"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# ---- other projects' pages -----------------------------------------------------------------

#: What this site links to. Without network these names, and the pages they stand on, are enough
#: to link to; with it, the whole inventory of each project is read.
FALLBACKS = {
    "celery": (
        "https://docs.celeryq.dev/en/stable/",
        {
            "class celery.Celery": "reference/celery.html#celery.Celery",
            "class celery.result.AsyncResult": "reference/celery.result.html",
            "module celery.result": "reference/celery.result.html",
        },
    ),
    "kombu": (
        "https://docs.celeryq.dev/projects/kombu/en/stable/",
        {
            "class kombu.Connection": "reference/kombu.html#kombu.Connection",
            "module kombu": "reference/kombu.html",
            "exception kombu.exceptions.OperationalError": "reference/kombu.exceptions.html",
        },
    ),
    "python": ("https://docs.python.org/3/", {"module datetime": "library/datetime.html"}),
}


#: Gone with Sphinx' process.
_inventories = TemporaryDirectory(prefix="native-delay-docs-")


def _inventory(project: str, names: dict[str, str]) -> str:
    """A file with *names*, as Sphinx writes them for other projects to link to."""
    head = (
        "# Sphinx inventory version 2\n"
        f"# Project: {project}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = [
        f"{name} py:{kind} 1 {page} -\n"
        for (kind, name), page in ((key.split(), page) for key, page in names.items())
    ]
    path = Path(_inventories.name) / f"{project}.inv"
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return str(path)


intersphinx_mapping = {
    project: (url, (None, _inventory(project, names)))
    for project, (url, names) in FALLBACKS.items()
}
intersphinx_timeout = 5
