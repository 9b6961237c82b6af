"""HTML pages that tools write, parsed as a browser does."""

from __future__ import annotations

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def data(self):
        found = [text for text in self.texts["script"] if text.startswith("{")]
        assert len(found) == 1
        return json.loads(found[0])
