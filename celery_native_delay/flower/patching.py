"""Flower's templates with our links in its bar; ours beside them.

Flower has no place for additions, so these are made while its templates are loaded. Where a
release has changed so much that one does not fit, it is left out, and the page works without.
"""

from __future__ import annotations

import re
from pathlib import Path

import flower
from celery.utils.log import get_logger
from tornado.template import Loader, Template

logger = get_logger(__name__)

OURS = Path(__file__).parent / "templates"

STATIC = Path(__file__).parent / "static"

_NAVBAR = """\\1
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'delays' %} active{% end %}"
            href="{{ reverse_url('delays') }}"
            {% if active_tab == 'delays' %}aria-current="page"{% end %}>Delays</a>
        </li>
        {% if handler.application.is_rated or active_tab == 'rates' %}
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'rates' %} active{% end %}"
            href="{{ reverse_url('delays-rates') }}"
            {% if active_tab == 'rates' %}aria-current="page"{% end %}>Rates</a>
        </li>
        {% end %}"""

#: By template: what to look for, what to put there.
PATCHES = {
    "navbar.html": (
        r"(<li[^>]*>\s*<a(?:(?!</li>).)*reverse_url\('broker'\)(?:(?!</li>).)*</li>)",
        _NAVBAR,
    ),
}


class PatchedTemplates(Loader):
    """Loader of Flower's templates, patched, and of ours; tornado's ``template_loader``."""

    def __init__(self) -> None:
        super().__init__(str(Path(flower.__file__).parent / "templates"))

    def resolve_path(self, name: str, parent_path: str | None = None) -> str:
        """The name under which templates include each other: there are no folders."""
        return name

    def _create_template(self, name: str) -> Template:
        ours = OURS / name
        path = ours if ours.exists() else Path(self.root) / name
        return Template(patched(name, path.read_text()), name=name, loader=self)


def patched(name: str, text: str) -> str:
    """The *text* of one of Flower's templates with our links in it."""
    if name not in PATCHES:
        return text
    pattern, replacement = PATCHES[name]
    changed, times = re.subn(pattern, replacement, text, count=1, flags=re.DOTALL)
    if not times:
        logger.warning("native delay: this Flower's %s is unknown, it stays as it is", name)
    return changed
