"""`Report`: a document as a page, as JSON, as a table in the terminal, and inline in a notebook."""

from __future__ import annotations

import html
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io import write_text
from .document import Document, read
from .page import render
from .terminal import as_text

_DATA = re.compile(r'<script type="application/json" id="secateur-data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Report:
    """What was done to a model and what it gained. `save` writes a page or JSON; `print` shows a table."""

    document: Document

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads a report that was saved as a page or as JSON."""
        text = Path(path).read_text(encoding="utf-8")
        found = _DATA.search(text)
        return cls(read(found[1] if found else text))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to a file ending in .html, or the document to one ending in .json. It is complete or not there."""
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm", ".json"):
            raise ValueError(f"{target} must end in .html (a page) or .json (the same as data)")
        text = self.json() if target.suffix.lower() == ".json" else self.html()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
        return target

    def html(self) -> str:
        """The page, one file that loads nothing."""
        return render(self.document)

    def json(self) -> str:
        """The document as JSON text."""
        return self.document.to_json(indent=1)

    def to_dict(self) -> dict[str, Any]:
        """The document as plain values that JSON can hold."""
        return self.document.to_dict()

    def __str__(self) -> str:
        return as_text(self.document)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its styles and those of the notebook do not meet."""
        page = html.escape(self.html(), quote=True)
        return (
            f'<iframe title="{html.escape(self.document.model.name, quote=True)}: pruning report" sandbox="allow-scripts" '
            f'style="width:100%;height:44rem;border:0" srcdoc="{page}"></iframe>'
        )
