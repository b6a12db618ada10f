"""The order of the items, and the text of numbers and tables."""

from dpftrl.paper import results
from dpftrl.paper.results import as_csv, chosen, shown


def test_items_come_in_the_order_of_the_paper_and_once():
    names = [item.name for item in chosen(["launches", "tab-mech", "launches"])]
    assert names == ["tab-mech", "launches"]


def test_formatting_of_numbers():
    assert shown(12345.6) == "12,346"
    assert shown(-0.00001234) == "-1.234e-05"
    assert as_csv([{"a": 0.1, "b": None}]) == "a,b\n0.1,\n"


def test_a_figure_replaces_a_link_and_does_not_follow_it(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("my notes")
    for kind in results.FORMATS:
        (tmp_path / f"fig.{kind}").symlink_to(victim)
    results._draw_files(lambda figure, _: figure.subplots(), [], 2.0, tmp_path, "fig")
    assert victim.read_text() == "my notes"
    assert all(not (tmp_path / f"fig.{kind}").is_symlink() for kind in results.FORMATS)
