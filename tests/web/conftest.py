"""A client of the application, with the processes that compute."""

from collections.abc import Iterator

import pytest
from web_client import ADDRESS, TestClient, csrf_of, make_app


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(), base_url=ADDRESS) as opened:
        opened.headers.update(csrf_of(opened))
        yield opened
