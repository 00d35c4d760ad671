"""MkDocs hooks: add the generated pages, and make links to files outside docs/ work on the site."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    wanted: set[str] = set()
    for name, text in pages.MADE.items():
        files.append(File.generated(config, name, content=text()))
    for file in files.documentation_pages():
        wanted.update(pages.linked(file.content_string, file.src_uri)[1])
    for path in sorted(wanted):
        files.append(File.generated(config, f"{pages.SOURCE}/{path}", abs_src_path=str(pages.ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return pages.linked(markdown, page.file.src_uri)[0]
