"""A client of the application in this process."""

import re
import warnings

with warnings.catch_warnings():  # starlette uses a name that anyio has moved
    warnings.simplefilter("ignore", DeprecationWarning)
    from starlette.testclient import TestClient

from dpftrl.web.app import make_app

__all__ = ["ADDRESS", "TestClient", "csrf_of", "make_app"]

ADDRESS = "http://127.0.0.1:8000"
TestClient.__test__ = False  # pytest takes its name for that of a test


def csrf_of(client: TestClient) -> dict[str, str]:
    """The header that the page sends with POST requests."""
    match = re.search(r'name="csrf-token" content="([^"]+)"', client.get("/").text)
    assert match is not None
    return {"x-csrf-token": match[1]}
