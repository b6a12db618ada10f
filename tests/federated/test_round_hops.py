"""One round can be followed through the code: it stays within few files."""

import json
import subprocess
import sys
from pathlib import Path

MOST_FILES, MOST_SWITCHES = 25, 80


def test_one_round_touches_few_files_and_seldom_goes_from_one_to_another():
    script = Path(__file__).parents[2] / "benchmarks" / "round_hops.py"
    ended = subprocess.run(
        [sys.executable, script, "--json"], capture_output=True, text=True, check=True
    )
    counts = json.loads(ended.stdout)
    assert len(counts["names"]) == counts["files"] > 10  # the script follows a round at all
    assert counts["files"] <= MOST_FILES
    assert counts["switches"] <= MOST_SWITCHES
