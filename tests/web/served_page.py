"""Run as a program: FOLDER; serves the page with its runs, until it is ended."""

import sys
from pathlib import Path

from dpftrl.web.serve import serve

if __name__ == "__main__":
    place = Path(sys.argv[1])
    serve(
        runs=place,
        state_folder=place / "state",
        host="127.0.0.1",
        port=0,
        token=None,
        on_address=lambda address: print(address, flush=True),  # noqa: T201
        browser=False,
    )
