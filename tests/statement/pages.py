"""Read rendered documents back: with a strict HTML parser, and an independent Markdown renderer."""

from html.parser import HTMLParser

from markdown_it import MarkdownIt

VOID = {"meta", "br", "hr", "link", "img", "input", "source", "base"}
INLINE = {"strong", "code", "em"}
UNSEEN = {"style", "title", "head"}


class Page(HTMLParser):
    """A parsed HTML page. Parsing fails on a tag that is not closed properly.

    Attributes:
        tags: All tags with their attributes, in order.
        text: The visible text.
        title: The title of the page.
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
    """Render Markdown and parse the result. Raw HTML in the source is passed through."""
    return Page(MarkdownIt("commonmark").enable("table").render(source))
