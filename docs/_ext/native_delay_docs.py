"""The pictures that the pages take from the code itself."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from celery_native_delay import DelaySettings, Rate
from celery_native_delay.transports.rabbitmq.topology import Binding, Queue, Topology

from level_pictures import levels_svg, path_svg
from line_pictures import line_svg


class LevelsPicture(SphinxDirective):
    """The declarations of three levels of a second, none fused, with one queue bound to them."""

    def run(self) -> list[nodes.Node]:
        topology = Topology(DelaySettings(levels=3, resolution=1, fused_bits=0))
        pattern = topology.delivery_pattern("%shop.emails.#")
        emails = [Queue("emails"), Binding(topology.delivery_exchange, "emails", pattern)]
        return [_picture(levels_svg([*topology.plan(), *emails], shorten=f"{topology.name}."))]


class PathPicture(SphinxDirective):
    """The queues in which a message with the default settings waits so many seconds."""

    required_arguments = 1
    option_spec: ClassVar[Any] = {"fused": directives.nonnegative_int}

    def run(self) -> list[nodes.Node]:
        seconds = float(self.arguments[0])
        fused = self.options.get("fused", DelaySettings().fused_bits)
        topology = Topology(DelaySettings(fused_bits=fused))
        return [_picture(path_svg(topology, seconds), narrow=True)]


class LinePicture(SphinxDirective):
    """A line of one key that is being spread."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        return [_picture(line_svg(Rate(self.arguments[0], burst=int(self.arguments[1]))))]


def _picture(svg: str, *, narrow: bool = False) -> nodes.Node:
    classes = "delay-picture narrow" if narrow else "delay-picture"
    return nodes.raw("", f'<div class="{escape(classes)}">{svg}</div>', format="html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("levels-picture", LevelsPicture)
    app.add_directive("path-picture", PathPicture)
    app.add_directive("line-picture", LinePicture)
    return {"parallel_read_safe": True}
