"""Reading back what was rendered: a strict HTML parser, and a Markdown renderer of its own."""

from html.parser import HTMLParser

from markdown_it import MarkdownIt

VOID = {"meta", "br", "hr", "link", "img", "input", "source", "base"}
INLINE = {"strong", "code", "em"}
UNSEEN = {"style", "title", "head"}


class Page(HTMLParser):
    """Takes a page apart, and fails on a tag that is not closed where it should be.

    Attributes:
        tags: Every tag with its attributes, in order.
        text: What a reader sees, in one string.
    """

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.title = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    @property
    def words(self) -> list[str]:
        return self.text.split()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag not in INLINE:
            self.text += " "

    def handle_data(self, data):
        if "title" in self._open:
            self.title += data
        if not UNSEEN & set(self._open):
            self.text += data


def page_of_markdown(source: str) -> Page:
    """What a Markdown renderer makes of it; raw HTML in it would be let through, and show."""
    return Page(MarkdownIt("commonmark").enable("table").render(source))
