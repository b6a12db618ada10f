"""Canonical forms of client ids, for single ids and for columns."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpftrl._internal.client_ids import (
    MOST_PADDED_DIGITS,
    canonical_id,
    canonical_ids,
    first_unfit,
    has_known_spellings,
    is_plain_id,
    other_spellings,
    why_unfit,
)

LARGE = "1" + "0" * 20

SAME = {
    "space before": ("a", " a"),
    "space after": ("a", "a "),
    "tab": ("a", "a\t"),
    "no-break space": ("a", "a\u00a0"),
    "no-break space inside": ("a b", "a\u00a0b"),
    "ideographic space": ("a", "\u3000a"),
    "zero-width space": ("a", "\u200ba"),
    "zero-width space inside": ("ab", "a\u200bb"),
    "zero-width joiner": ("a", "a\u200d"),
    "byte order mark": ("a", "\ufeffa"),
    "soft hyphen": ("ab", "a\u00adb"),
    "writing direction": ("a", "\u200ea"),
    "decomposed": ("\u00e9", "e\u0301"),
    "decomposed over an invisible character": ("\u00e9", "e\u200b\u0301"),
    "decomposed Hangul": ("\ud55c", "\u1112\u1161\u11ab"),
    "one leading zero": ("7", "07"),
    "leading zeros": ("7", "007"),
    "zeros": ("0", "000"),
    "plus": ("7", "+7"),
    "point": ("7", "7."),
    "decimal": ("7", "7.0"),
    "decimals": ("70", "0070.000"),
    "exponent": ("7", "7e0"),
    "exponent with a sign": ("7", "7E+00"),
    "short exponent": ("100000", "1e5"),
    "fraction and exponent": ("1500", "1.5e3"),
    "negative exponent": ("15", "150e-1"),
    "minus": ("-7", "-07"),
    "minus zero": ("0", "-0.0"),
    "large float": (LARGE, "1e+20"),
    "space and zeros": ("7", " 007\u00a0"),
}


@pytest.mark.parametrize(("form", "other"), SAME.values(), ids=SAME.keys())
def test_the_same_client_has_one_canonical_form(form, other):
    assert canonical_id(form) == canonical_id(other) == form
    assert canonical_ids(pl.Series([form, other])).forms.to_list() == [form, form]


DIFFERENT = {
    "case": ("a", "A"),
    "space inside": ("a b", "ab"),
    "two spaces inside": ("a b", "a  b"),
    "accents": ("e", "é"),
    "compatibility forms": ("x2", "x²"),
    "ligature": ("fi", "ﬁ"),
    "wide brackets": ("a(1)", "a（1）"),  # noqa: RUF001
    "joined emoji": ("👩👩", "👩\u200d👩"),
    "rooms": ("1.1", "1.10"),
    "versions": ("1.0.0", "1.0"),
    "hexadecimal with a zero": ("0e12", "0e13"),
    "hexadecimal with two digits": ("12e4", "120e3"),
    "hexadecimal with a padded exponent": ("1e05", "100000"),
    "zeros after a letter": ("client-7", "client-007"),
    "minus": ("7", "-7"),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_clients_keep_different_forms(one, other):
    assert canonical_id(one) != canonical_id(other)
    assert canonical_ids(pl.Series([one, other])).forms.n_unique() == 2


digits = st.text("0123456789+-.eE", min_size=1, max_size=9)
numbers = st.from_regex(
    r"[+-]?0{0,3}[0-9]{1,17}(\.0{0,3}[0-9]?)?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)
near_letters = st.text(
    "ae07. \u00a0\u200b\ufeff\u00ad\u0301\u3000\t\n\0é\u0410가一", min_size=1, max_size=6
)
# Characters that were recently added to Unicode may be unknown to Python or to polars.
anything = st.text(st.characters(exclude_categories=["Cs", "Cn"]), min_size=1, max_size=6)
ids = st.lists(st.one_of(digits, numbers, near_letters, anything), min_size=1, max_size=30)


@given(ids=ids)
@settings(max_examples=300)
def test_columns_have_the_forms_of_their_ids(ids):
    column = pl.Series(ids, dtype=pl.String)
    found = canonical_ids(column)
    forms = [canonical_id(one) for one in ids]
    assert found.forms.to_list() == forms
    assert found.respelled == (forms != ids)
    reasons = [(i, why) for i, one in enumerate(ids) if (why := why_unfit(one))]
    assert first_unfit(column, found) == (reasons[0] if reasons else None)
    for one, form in zip(ids, forms, strict=True):
        assert canonical_id(form) == form
        if is_plain_id(one):
            assert form == one
            assert why_unfit(one) is None


@given(ids=ids)
@settings(max_examples=200)
def test_other_spellings_are_all_that_have_the_same_form(ids):
    for one in ids:
        others = list(other_spellings(one))
        assert one not in others
        assert len(set(others)) == len(others)
        assert all(canonical_id(other) == canonical_id(one) for other in others)
        assert all(has_known_spellings(other) for other in others)
        if has_known_spellings(one):
            assert canonical_id(one) in {one, *others}
    known = [one for one in ids if has_known_spellings(one)]
    for one in known:
        same = {other for other in known if canonical_id(other) == canonical_id(one)}
        assert same <= {one, *other_spellings(one)}


def test_padded_numbers_are_known_up_to_a_length():
    longest = "7".zfill(MOST_PADDED_DIGITS)
    assert longest in set(other_spellings("7"))
    assert has_known_spellings(longest)
    assert not has_known_spellings("0" + longest)
    assert has_known_spellings("7" * 1000)


UNFIT = {
    "line break": ("a\nb", "line break"),
    "carriage return": ("a\r", "line break"),
    "NUL": ("a\0", "NUL"),
    "spaces": ("  ", "no visible character"),
    "zero-width": ("\u200b", "no visible character"),
    "large float": ("1e+20", "2^53 or more"),
    "large decimal": ("9007199254740993.0", "2^53 or more"),
    "digits that Python would not read": ("1" * 5000 + ".0", "2^53 or more"),
}


@pytest.mark.parametrize(("text", "says"), UNFIT.values(), ids=UNFIT.keys())
def test_unfit_ids_have_a_reason(text, says):
    assert says in (why_unfit(text) or "")


@pytest.mark.parametrize(
    "text", ["a", "two words", LARGE, "9007199254740991.0", "1e20", "漢字", "-"]
)
def test_fit_ids_have_no_reason_against_them(text):
    assert why_unfit(text) is None
