"""What the pages take from the code itself: settings, and pictures."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from celery_native_delay import DelaySettings, Rate
from celery_native_delay.transports.rabbitmq.topology import Binding, Queue, Topology

from level_pictures import levels_svg, path_svg
from line_pictures import line_svg


class Settings(SphinxDirective):
    """A definition list of the settings named in the content: name, default, docstring."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        analyzer = ModuleAnalyzer.for_module("celery_native_delay.settings")
        documented = analyzer.find_attr_docs()
        defaults = {field.name: field.default for field in fields(DelaySettings)}
        lines: list[str] = []
        for name in " ".join(self.content).split():
            if name not in defaults:
                raise self.error(f"expected a setting, got {name!r}")
            text = " ".join(documented["DelaySettings", name]).strip()
            lines += [f"(setting-{name})=", f"### `native_delay_{name}`", ""]
            lines += [f"Default: `{_shown(defaults[name])}`", "", text, ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


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


def _shown(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _picture(svg: str, *, narrow: bool = False) -> nodes.Node:
    classes = "delay-picture narrow" if narrow else "delay-picture"
    return nodes.raw("", f'<div class="{escape(classes)}">{svg}</div>', format="html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings", Settings)
    app.add_directive("levels-picture", LevelsPicture)
    app.add_directive("path-picture", PathPicture)
    app.add_directive("line-picture", LinePicture)
    return {"parallel_read_safe": True}
