"""Pages that commands write, as a browser meets them."""

import html.parser


class Page(html.parser.HTMLParser):
    """Balanced tags, ids, and whatever the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        words = dict(attrs)
        self.ids += [words["id"] or ""] if "id" in words else []
        self.loads += [words[name] or "" for name in ("src", "href", "xlink:href") if name in words]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> str:
    """The text of a page, which is well-formed, loads nothing and has colours for the dark."""
    page = Page()
    page.feed(text)
    assert text.startswith("<!DOCTYPE html>") and page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(target.startswith("#") for target in page.loads)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    return text
