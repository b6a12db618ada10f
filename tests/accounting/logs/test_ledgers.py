"""The ledger of a run gives the same summary with polars and without it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dpftrl import InvalidInput
from dpftrl.accounting.logs import Limits, ledgers, observe
from dpftrl.accounting.logs.ledgers import observe_ledger


@pytest.fixture
def no_polars(monkeypatch):
    monkeypatch.setattr(ledgers, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "polars", None)


def ledger(folder: Path, rows: str) -> Path:
    path = folder / "ledger.csv"
    path.write_text("round,client,status\n" + rows, encoding="utf-8")
    return path


@pytest.mark.parametrize("clients", [60, 100])
def test_the_summary_is_that_of_polars(clients, tmp_path, monkeypatch):
    generator = np.random.default_rng(clients)
    rows = "".join(
        f'{number},"device, {generator.integers(clients)}",{generator.choice(ledgers.STATUSES)}\n'
        for number in sorted(generator.integers(40, size=400))
    )
    path, limits = ledger(tmp_path, rows), Limits(min_sep=6, max_participations=3)
    expected = observe(path, limits)
    assert expected.duplicate_rows
    assert expected.broken_clients > expected.broken_counted_clients > 0
    assert observe_ledger(path, limits) == expected
    monkeypatch.setattr(ledgers, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "polars", None)
    assert observe_ledger(path, limits) == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "has no rows"),
        ("0,a,counted\n1,b\n", "line 3: expected a round"),
        ("0,a,present\n", "got '0,a,present'"),
        ("-1,a,counted\n", "expected a round"),
        ("0,,counted\n", "expected a round"),
        ("0,7,counted\n1,007,counted\n", "differ only in how their ids are written"),
    ],
)
@pytest.mark.usefixtures("no_polars")
def test_a_file_that_is_no_ledger_is_refused(rows, message, tmp_path):
    with pytest.raises(InvalidInput, match=message):
        observe_ledger(ledger(tmp_path, rows))


@pytest.mark.usefixtures("no_polars")
def test_other_columns_need_polars(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("client,round\na,0\n")
    with pytest.raises(InvalidInput, match=r"pip install 'dpftrl\[logs\]'"):
        observe_ledger(path)
