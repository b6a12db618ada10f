"""Write a participation log as CSV, JSON lines and Parquet: FOLDER ROUNDS COHORT POPULATION.

Everybody comes back after about as many rounds as it takes to ask everybody, sooner or later by
chance, as clients do that check in whenever they are idle.
"""

import json
import sys
from pathlib import Path

import numpy as np
import polars as pl


def main() -> None:
    """Draw the log and write it, in a random order."""
    folder = Path(sys.argv[1])
    rounds, cohort, population = (int(number) for number in sys.argv[2:])
    draw = np.random.default_rng(0)
    phase = draw.random(population)
    rows = rounds * cohort
    turns = [
        np.argsort(turn + phase + 0.15 * draw.random(population))
        for turn in range(-(-rows // population))
    ]
    order = draw.permutation(rows)
    log = pl.DataFrame(
        {"round": (np.arange(rows) // cohort)[order], "client": np.concatenate(turns)[:rows][order]}
    ).with_columns(client=pl.format("client-{}", pl.col("client").cast(pl.String).str.zfill(7)))
    log.write_csv(folder / "log.csv")
    log.write_ndjson(folder / "log.jsonl")
    log.write_parquet(folder / "log.parquet")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
