"""Verify runs, in a process without planted bugs.

Usage: python _planted_verify.py FOLDER... Prints, for each folder, the checks that failed as JSON.
"""

import json
import sys
from pathlib import Path

from dpftrl.verify import verify_run


def failures(folder: Path) -> dict[str, str]:
    """Return the failed checks of all runs in a folder, with their texts."""
    found: dict[str, str] = {}
    for run in sorted(folder.glob("*/run")):
        for check in verify_run(run, run.parent / "state").checks:
            if check.outcome == "failed":
                found.setdefault(check.name, check.text)
    return found


if __name__ == "__main__":
    print(json.dumps({folder: failures(Path(folder)) for folder in sys.argv[1:]}))
