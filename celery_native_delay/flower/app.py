"""Flower's application with this package's pages, and with links in the navigation bar.

Flower has no hook for links. Therefore this module inserts the links while Flower loads the
template of the navigation bar. If a Flower release has another navigation bar, the links are
missing, but the pages work.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import flower
from celery.utils.log import get_logger
from flower.app import Flower, rewrite_handler
from tornado.template import Loader, Template
from tornado.web import StaticFileHandler, url

from ..app.installation import installed
from ..errors import NativeDelayError
from ..metrics import Exposed, expose
from . import api, pages
from .asking import Asking

logger = get_logger(__name__)

OURS = Path(__file__).parent / "templates"

_NAVBAR = """\\1
        {% for page in ('delays', 'rates', 'schedules', 'runs') %}
        {% if page in handler.application.linked or active_tab == page %}
        <li class="nav-item">
          <a class="nav-link{% if active_tab == page %} active{% end %}"
            href="{{ reverse_url(page) }}"
            {% if active_tab == page %}aria-current="page"{% end %}>{{ page.title() }}</a>
        </li>
        {% end %}
        {% end %}"""

#: The links are inserted after Flower's own link *Broker*.
_BROKERS_LINK = r"(<li[^>]*>\s*<a(?:(?!</li>).)*reverse_url\('broker'\)(?:(?!</li>).)*</li>)"


class PatchedTemplates(Loader):
    """Template loader that inserts links to this package's pages into Flower's navigation bar."""

    def __init__(self) -> None:
        super().__init__(str(Path(flower.__file__).parent / "templates"))

    def resolve_path(self, name: str, parent_path: str | None = None) -> str:
        return name

    def _create_template(self, name: str) -> Template:
        ours = OURS / name
        path = ours if ours.exists() else Path(self.root) / name
        return Template(patched(name, path.read_text()), name=name, loader=self)


def patched(name: str, text: str) -> str:
    """If *name* is "navbar.html", insert links to this package's pages into *text*."""
    if name != "navbar.html":
        return text
    changed, times = re.subn(_BROKERS_LINK, _NAVBAR, text, count=1, flags=re.DOTALL)
    if not times:
        logger.warning("native delay: cannot add links to this Flower's %s: open /delays", name)
    return changed


HANDLERS = [
    url(r"/delays", pages.PageHandler, {"name": "delays"}, name="delays"),
    url(r"/delays/summary", pages.Summary, name="delays-summary"),
    url(r"/delays/datatable", pages.DataTable, name="delays-datatable"),
    url(r"/delays/parked", pages.ParkedHandler, name="delays-parked"),
    url(r"/delays/story", pages.Story, name="delays-story"),
    url(r"/delays/ids", pages.MatchingIds, name="delays-ids"),
    url(r"/delays/rates", pages.PageHandler, {"name": "rates"}, name="rates"),
    url(r"/delays/rates/lines", pages.LinesHandler, name="delays-lines"),
    url(r"/delays/schedules", pages.PageHandler, {"name": "schedules"}, name="schedules"),
    url(r"/delays/schedules/entries", pages.ScheduleEntries, name="schedules-entries"),
    url(r"/delays/runs", pages.PageHandler, {"name": "runs"}, name="runs"),
    url(r"/delays/runs/list", pages.RunsHandler, name="runs-list"),
    url(
        r"/delays/static/(.*)", StaticFileHandler, {"path": str(pages.STATIC)}, name="delays-static"
    ),
    url(r"/api/delays", api.ListDelays),
    url(
        r"/api/delays/schedules/(pause|resume|run-now|add|change|remove)",
        api.ChangeSchedule,
        name="schedules-change",
    ),
    url(r"/api/delays/runs/(cancel|reschedule)", api.ChangeRun, name="runs-change"),
    url(r"/api/delays/parked/(requeue|purge)", api.ChangeParked, name="delays-parked-change"),
    url(r"/api/delays/(hold|drop|release)", api.ChangeHolds, name="delays-holds-change"),
    url(r"/api/delays/(cancel|reschedule|run-now)", api.ChangeMany, name="delays-change"),
]

#: Python's switch interval. A thread that reads many tasks delays the IO loop by this time. The
#: default is 5 ms.
_SWITCH_SECONDS = 0.0005


class DelayFlower(Flower):
    """Flower's application with this package's pages, REST API and metrics."""

    def __init__(self, options: Any = None, **kwargs: Any) -> None:
        kwargs["template_loader"] = PatchedTemplates()
        super().__init__(options=options, **kwargs)
        prefix = self.options.url_prefix
        # Tornado puts them before Flower's own handlers, of which the last one matches all URLs.
        self.add_handlers(
            ".*", [rewrite_handler(each, prefix) for each in HANDLERS] if prefix else HANDLERS
        )
        self.asking = Asking(self.capp)
        self._exposed: Exposed | None = None
        #: The names of the pages with a link in the navigation bar. "rates" and "schedules" have a
        #: link only if the app's settings have rates or schedules, "runs" once a run was seen.
        self.linked = {"delays"}
        #: By run: the numbers of its tasks. They are counted again at this monotonic time.
        self.run_counts: dict[str, dict[str, int | None]] = {}
        self.count_runs_at = 0.0

    def start(self) -> None:
        """Start the threads that collect metrics, and serve requests until :meth:`stop`."""
        # Flower's /metrics serves the default registry.
        with suppress(NativeDelayError):  # the page shows the error
            settings = installed(self.capp).settings()
            used = {"rates": settings.rates, "schedules": settings.schedules}
            self.linked.update(name for name, is_used in used.items() if is_used)
            self._exposed = expose(self.capp)
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().start()

    def stop(self) -> None:
        """Stop the web server and this package's threads."""
        if self._exposed is not None:
            self._exposed.close()
            self._exposed = None
        self.asking.stop()
        super().stop()
