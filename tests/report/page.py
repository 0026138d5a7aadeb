"""A page, parsed."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The texts of cells and paragraphs; fails where tags do not match."""

    VOID = ("meta", "input")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open, self.texts, self.loaded = list[str](), list[tuple[str, str]](), list[str]()
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.loaded += [link for link in links if not link.startswith("#")]  # what is on the page itself
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))
