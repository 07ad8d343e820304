"""Hooks of MkDocs: adds pages from outside of docs/ to the site, and turns links to other files of the repository into text."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "results.md": "benchmarks/RESULTS.md",
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    place = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def redirect(match):
        text, path, anchor = match[1], match[2], match[3] or ""
        target = (place.parent / path).resolve()
        found = {ROOT / source: name for name, source in PAGES.items()}.get(target)
        if target == ROOT / "README.md":
            found = "index.md"
        elif found is None and (ROOT / "docs") in target.parents:
            found = target.relative_to(ROOT / "docs").as_posix()
        if found is None:
            return text if text.startswith("`") else f"{text} (`{target.relative_to(ROOT).as_posix()}`)"
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{found}{anchor})"

    return _LINK.sub(redirect, markdown)
