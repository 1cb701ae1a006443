"""What hatchling asks when it builds the package: the README for the package index.

A package index shows the README without the repository around it, so no link may be relative.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)[ \n]*")
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)")

_NO_ADDRESS = (
    "expected [project.urls] with a Source in pyproject.toml, or a development version, got "
    "version {version} and no Source: a release on a package index must say where its code is"
)


class IndexMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        version = metadata["version"]
        source = metadata.get("urls", {}).get("Source")
        if source is None and ".dev" not in version:
            raise ValueError(_NO_ADDRESS.format(version=version))
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = for_the_index(readme, source and f"{source.rstrip('/')}/blob/v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def for_the_index(readme: str, pages: str | None) -> str:
    """Return *readme* without pictures, with links to *pages*; without *pages*, with none."""
    link = rf"[\1]({pages}/\2)" if pages else r"\1"
    return _LINK.sub(link, _IMAGE.sub("", readme))
