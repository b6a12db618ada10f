"""Participation logs written and read in plain Python: an oracle without polars and numpy."""

import csv
import io
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import strategies as st

Row = tuple[int, str, str | None]

FORMATS = (".csv", ".jsonl", ".parquet")
STATUSES = [None, "counted", "contacted", "abandoned"]


@st.composite
def logs(draw: st.DrawFn, most_rounds: int = 30) -> list[Row]:
    """Rows in any order, some repeated, from so few clients that they take part repeatedly."""
    odd = ["7", "08", " 9", "x,y", 'q"q', "two words", "é😀", "null", "NULL", "0e12"]
    clients = draw(st.sampled_from([["a"], odd, [f"client-{i:07}" for i in range(9)]]))
    row = st.tuples(
        st.integers(0, most_rounds - 1), st.sampled_from(clients), st.sampled_from(STATUSES)
    )
    return draw(st.lists(row, min_size=1, max_size=60))


def write(path: Path, rows: list[Row], with_status: bool = True) -> Path:
    """Write a log in the format of the file's ending."""
    names = ["round", "client", "status"][: 3 if with_status else 2]
    table = [dict(zip(names, row, strict=False)) for row in rows]
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(table)
        path.write_text(text.getvalue())
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        columns = {name: [row[name] for row in table] for name in names}
        types = {"round": pl.Int32, "client": pl.String, "status": pl.String}
        pl.DataFrame(columns, {name: types[name] for name in names}).write_parquet(path)
    return path


def patterns(rows: list[Row], counted_only: bool = True) -> dict[str, list[int]]:
    """The rounds of each client."""
    taken: dict[str, set[int]] = defaultdict(set)
    for when, client, status in rows:
        if not counted_only or status in (None, "counted"):
            taken[client].add(when)
    return {client: sorted(rounds) for client, rounds in taken.items()}


def differences(pattern: list[int]) -> list[int]:
    return [later - sooner for sooner, later in pairwise(pattern)]


def expected(rows: list[Row]) -> dict[str, Any]:
    """The expected fields of `observe`, except those about limits."""
    counted, contacted = patterns(rows), patterns(rows, counted_only=False)
    rounds = max(when for when, _, _ in rows) + 1
    lines = Counter((client, when) for when, client, status in rows if status in (None, "counted"))
    gaps = [gap for pattern in counted.values() for gap in differences(pattern)]
    all_gaps = [gap for pattern in contacted.values() for gap in differences(pattern)]
    return {
        "rounds": rounds,
        "empty_rounds": rounds - len({when for p in counted.values() for when in p}),
        "clients": len(counted),
        "participations": sum(map(len, counted.values())),
        "min_sep": min(gaps, default=rounds),
        "max_participations": max(map(len, counted.values()), default=0),
        "gaps": _exact_bins(gaps),
        "counts": _exact_bins([len(pattern) for pattern in counted.values()]),
        "contacted_clients": len(contacted),
        "contacts": sum(map(len, contacted.values())),
        "contacted_min_sep": min(all_gaps, default=rounds),
        "duplicate_rows": sum(lines.values()) - len(lines),
        "from_times": False,
        "unseen_rounds": 0,
    }


def _exact_bins(values: list[int]) -> tuple[tuple[int, int, int], ...]:
    return tuple((value, value, number) for value, number in sorted(Counter(values).items()))
