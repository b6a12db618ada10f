"""Documents: Markdown and HTML have the same words, whatever text is put into them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, page_of_markdown

from dpftrl.statement.document import (
    STYLE,
    Bullets,
    Commands,
    Document,
    Notice,
    Paragraph,
    Section,
    Span,
    Table,
    html,
    markdown,
    plain,
)

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a|b|c",
    "\\|",
    "`code` and ``more``",
    "`",
    "**bold** _italic_ ~~gone~~",
    "[link](https://example.org/) ![image](https://example.org/i.png)",
    "<https://example.org/>",
    "&lt;b&gt; &amp; &#60;",
    "# heading #",
    "- item",
    "+ item",
    "1. item",
    "12) item",
    "---",
    "===",
    "> quote",
    "    indented",
    "two\n\nparagraphs\n| a |\n|---|\n",
    "$x$ \\(y\\)",
    "*",
    "\\",
    "ends in a backslash\\",
    "bell\x07, null\x00, right to left\u202egnp.exe, half a pair\ud800",
    "",
]


def document(text: str) -> Document:
    """Return a document with the text in every possible place."""
    blocks = (
        Notice((Span("Attention.", "strong"), " ", text)),
        Paragraph(text),
        Paragraph(("before ", Span(text, "code"), " after")),
        Bullets((text, Span(text, "code"), "last")),
        Table(text, ("", text), ((text, text), (Span(text, "code"), "end"))),
        Commands((text.replace("\n", " "), "echo")),
    )
    return Document(text, blocks, (Section(text, blocks, (Section(text, blocks),)),))


def check(text: str) -> Page:
    """Check that both renderings parse, have the same words, and have only our own markup."""
    sample = document(text)
    page = Page(html(sample))
    assert page.words == page_of_markdown(markdown(sample)).words
    harmless = document("harmless")
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in Page(html(harmless)).tags]
    return page


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_literally(text):
    page = check(text)
    assert " ".join(plain(text).split()) in " ".join(page.words)
    assert not {"script", "img", "a"} & {tag for tag, _ in page.tags}


MARKUP = st.text(st.sampled_from("ab1 .)-+*_`[]()<>|\\~&;#=!:$\"'\n{}^é\u202e"), max_size=30)


@given(MARKUP | st.text(max_size=30))
def test_any_text_has_the_same_words_in_markdown_and_html(text):
    check(text)


def test_the_comparison_detects_a_renderer_that_does_not_escape():
    sample = document("a *b* c")
    careless = markdown(sample).replace("\\*", "*")
    assert page_of_markdown(careless).words != Page(html(sample)).words


def test_invisible_characters_are_replaced_by_a_visible_sign():
    for rendered in (markdown, html):
        text = rendered(document("left\u202eright\x1b[31m\ud800"))
        assert "left\ufffdright\ufffd" in text
        assert not set("\u202e\x1b\ud800") & set(text)
        text.encode()


def test_a_page_is_complete_and_loads_nothing():
    source = html(document("text"))
    page = Page(source)
    attributes = dict(page.tags)
    assert attributes["html"]["lang"] == "en"
    assert page.title == "text"
    assert not {"script", "link", "img", "iframe", "base", "a"} & attributes.keys()
    assert not {"src", "href"} & {name for _, given in page.tags for name in given}
    assert not re.search(r"url\(|@import|https?:", source)
    assert "default-src 'none'" in Page(source).tags[3][1]["content"]
    assert "prefers-color-scheme: dark" in source
    assert "@media print" in source


def test_tables_have_row_and_column_headers():
    page = Page(html(document("text")))
    scopes = [given.get("scope") for tag, given in page.tags if tag == "th"]
    assert set(scopes) == {"row", "col"}
    assert [tag for tag, _ in page.tags].count("caption") == 3


def test_colours_have_enough_contrast_to_their_background():
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w+)", scheme))
        for ground in ("ground", "soft"):
            for name in ("text", "enforced", "observed", "claimed", "assumed"):
                assert contrast(colours[name], colours[ground]) >= 4.5


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of the Web Content Accessibility Guidelines."""
    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
