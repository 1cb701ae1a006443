"""Flower's application with our pages in it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from flower.app import Flower, rewrite_handler
from tornado.web import StaticFileHandler, url

from ..app.installation import installed
from ..errors import NativeDelayError
from ..metrics import Exposed, expose
from . import api, pages
from .asking import Asking
from .patching import STATIC, PatchedTemplates

HANDLERS = [
    url(r"/delays", pages.DelaysPage, name="delays"),
    url(r"/delays/summary", pages.Summary, name="delays-summary"),
    url(r"/delays/datatable", pages.DataTable, name="delays-datatable"),
    url(r"/delays/parked", pages.Parked, name="delays-parked"),
    url(r"/delays/ids", pages.MatchingIds, name="delays-ids"),
    url(r"/delays/rates", pages.RatesPage, name="delays-rates"),
    url(r"/delays/rates/lines", pages.Lines, name="delays-lines"),
    url(r"/delays/static/(.*)", StaticFileHandler, {"path": str(STATIC)}, name="delays-static"),
    url(r"/api/delays", api.ListDelays),
    url(r"/api/delays/rates", api.ListRates),
    url(r"/api/delays/parked", api.ListParked),
    url(r"/api/delays/parked/(requeue|purge)", api.ChangeParked, name="delays-parked-change"),
    url(r"/api/delays/(cancel|reschedule|run-now)", api.ChangeMany, name="delays-change"),
    url(r"/api/delay/(cancel|reschedule|run-now)/(.+)", api.ChangeOne),
    url(r"/api/delay/(.+)", api.ShowDelay),
]

#: A thread that reads many tasks keeps the IO loop from its turn for so long, several times in a
#: row; by default it is 5 ms.
_SWITCH_SECONDS = 0.0005


class DelayFlower(Flower):
    """Flower's application with our pages, our API and metrics in it."""

    def __init__(self, options: Any = None, **kwargs: Any) -> None:
        kwargs["template_loader"] = PatchedTemplates()
        super().__init__(options=options, **kwargs)
        prefix = self.options.url_prefix
        # Tornado puts them before Flower's own, which end with one that takes everything.
        self.add_handlers(
            ".*", [rewrite_handler(each, prefix) for each in HANDLERS] if prefix else HANDLERS
        )
        self.asking = Asking(self.capp)
        self._exposed: Exposed | None = None
        #: True if tasks of the app have rates.
        self.is_rated = False

    def start(self) -> None:
        """Serve until :meth:`stop`."""
        # Flower's /metrics serves the default registry.
        with suppress(NativeDelayError):  # the page says why
            self.is_rated = bool(installed(self.capp).settings().rates)
            self._exposed = expose(self.capp)
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().start()

    def stop(self) -> None:
        """Stop serving, and end our threads."""
        if self._exposed is not None:
            self._exposed.close()
            self._exposed = None
        self.asking.stop()
        super().stop()
