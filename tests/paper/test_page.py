"""The page holds the numbers of the saved results, and no number that was typed by hand."""

from pathlib import Path

import pytest

from dpftrl._internal.progress import ignore_progress
from dpftrl.errors import InvalidInput
from dpftrl.paper import chosen, reproduce
from dpftrl.paper.page import insert
from dpftrl.paper.results import load_results

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def results(tmp_path):
    list(
        reproduce(chosen(["launches", "fig-blt-coeff"]), tmp_path / "paper", True, ignore_progress)
    )
    return tmp_path / "paper"


def test_blocks_are_replaced_and_inserting_twice_changes_nothing(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- begin gallery -->\nold\n<!-- end gallery -->\nbetween\n"
        "<!-- begin rows-launches -->\n<!-- end rows-launches -->\n"
        "<!-- begin counts -->\n<!-- end counts -->\n"
    )
    insert(results, page)
    text = page.read_text()
    assert "old" not in text
    assert "paper/fig-blt-coeff.png" in text
    assert f"| {' | '.join(load_results(results)[1].rows[0])} |" in text
    assert text.startswith("before\n")
    insert(results, page)
    assert page.read_text() == text


def test_a_block_without_a_result_is_refused(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- begin rows-fig-rmse -->\n<!-- end rows-fig-rmse -->\n")
    with pytest.raises(InvalidInput, match="rows-fig-rmse"):
        insert(results, page)


def test_the_page_in_the_docs_equals_the_saved_results(tmp_path):
    copy = tmp_path / "paper.md"
    (tmp_path / "paper").symlink_to(DOCS / "paper")
    copy.write_text((DOCS / "paper.md").read_text())
    insert(tmp_path / "paper", copy)
    assert copy.read_text() == (DOCS / "paper.md").read_text()


def test_saved_results_have_full_size_and_current_settings():
    items = {item.name: item for item in chosen([])}
    for saved in load_results(DOCS / "paper"):
        assert saved.settings == items[saved.item].settings(quick=False)
        assert not saved.quick


def test_the_page_names_what_is_missing(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- begin missing -->\n<!-- end missing -->\n")
    insert(results, page)
    assert "`fig-rmse`" in page.read_text()  # it has no result at all
    assert "`fig-blt-coeff`" in page.read_text()  # it has one of reduced size only
    assert "`launches`" not in page.read_text()  # it is as quick in full


def test_recomputed_claims_equal_the_saved_ones(tmp_path):
    saved = {one.item: one for one in load_results(DOCS / "paper")}
    for fresh in reproduce(chosen(["launches", "fig-blt-coeff"]), tmp_path, False, ignore_progress):
        assert fresh.claims == saved[fresh.item].claims
