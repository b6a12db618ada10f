"""What is refused: other hosts, other sites, missing tokens, and bodies that are too large."""

import pytest
from web_client import ADDRESS, TestClient, make_app

from dpftrl.errors import InvalidInput
from dpftrl.web.serve import is_local

FORM = {"mode": "fleet", "values": {"population": "many"}}


@pytest.fixture
def bare():
    """A client without its processes: nothing here computes."""
    return TestClient(make_app(), base_url=ADDRESS)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000"])
def test_the_names_of_this_machine_are_answered(bare, host):
    assert bare.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example"]
)
def test_another_host_name_is_refused(bare, host):
    assert bare.get("/", headers={"host": host}).status_code == 421


def test_every_response_has_the_policy(bare):
    for path in ("/", "/static/style.css", "/missing", "/runs"):
        headers = bare.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe-eval" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] in {"no-store", "no-cache"}
    script = policy.partition("script-src")[2].partition(";")[0]
    assert script.strip() == "'self'"


def test_the_page_loads_nothing_from_elsewhere(bare):
    texts = [bare.get("/").text, bare.get("/static/style.css").text]
    texts += [
        bare.get(f"/static/{name}.js").text for name in ("planner", "page", "figures", "runs")
    ]
    for text in texts:
        assert "//" not in text.replace("// ", "").replace("http://www.w3.org", "")
        assert "<script>" not in text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_of_other_sites_are_refused(bare, site):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    assert bare.get("/download/plan.json", headers=headers).status_code == 403
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert bare.get("/", headers=link).status_code == 200
    assert bare.post("/api/plan", json=FORM, headers=link).status_code == 403


def test_a_post_needs_the_csrf_token_of_the_page(bare):
    for path in ("/api/plan", "/api/jobs", "/runs/0123456789abcdef/verify", "/api/presets/0"):
        assert bare.post(path, json=FORM).status_code == 403
        assert bare.post(path, json=FORM, headers={"x-csrf-token": "guess"}).status_code == 403


def test_a_post_of_another_origin_is_refused(bare):
    headers = {"origin": "http://evil.example"}
    assert bare.post("/api/plan", json=FORM, headers=headers).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(bare, method):
    assert bare.request(method, "/").status_code == 405


def test_get_does_not_reach_what_changes_something(client):
    for path in ("/api/plan", "/api/jobs", "/api/jobs/x/cancel", "/runs/x/verify"):
        assert client.get(path).status_code in {404, 405}


def test_sizes_are_bounded(client):
    assert client.post("/api/plan", content=b" " * 20_000).status_code == 413
    assert client.get("/?" + "a" * 5_000).status_code == 414

    def pieces():
        for _ in range(10):
            yield b" " * 4_000

    assert client.post("/api/plan", content=pieces()).status_code == 413


def test_no_path_of_the_browser_is_opened(client):
    for path in (
        "/static/../app.py",
        "/static/%2e%2e%2fapp.py",
        "/static/layout.html",
        "/static//etc/passwd",
        "/download/..%2fplan.json",
    ):
        assert client.get(path).status_code == 404, path


def test_a_token_is_asked_for_once_and_then_kept_in_a_cookie():
    app = make_app(hosts=None, token="secret-token")
    with_token = TestClient(app, base_url="http://planner.example")
    for path in ("/", "/static/style.css", "/api/runs", "/?token=wrong", "/missing"):
        assert with_token.get(path).status_code == 401
    moved = with_token.get("/?token=secret-token&epsilon=4", follow_redirects=False)
    assert moved.status_code == 303
    assert moved.headers["location"] == "/?epsilon=4"
    cookie = moved.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert with_token.get("/").status_code == 200
    with_token.cookies.clear()
    assert with_token.get("/").status_code == 401


def test_a_folder_that_is_missing_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="not a folder"):
        make_app(runs=tmp_path / "missing")


def test_only_loopback_addresses_are_local():
    assert all(map(is_local, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_local, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
