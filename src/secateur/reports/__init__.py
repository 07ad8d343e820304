"""Reports: a model before and after pruning, as a page, JSON, a table in the terminal, or inline in a notebook.

- `document`: what a report says, as plain values. Everything else is made from it.
- `collect`, with `history`, `layers` and `measure`: makes the document from models and the results of calls.
- `figures`, `words`, `charts`, `curves`, `page`: numbers, the text, the pictures and the HTML, by rule.
- `output`: `Report`, the document in its four forms.
"""

from .collect import report
from .document import Document, read
from .output import Report

__all__ = ["report", "Report", "Document", "read"]
