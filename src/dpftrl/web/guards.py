"""What every request has to pass, and the headers of every response.

* The `Host` header must name this server: a page of another name that resolves to this machine
  cannot read anything (DNS rebinding).
* Requests that another site causes are refused, except following a link to a page.
* On an address that others can reach, every request needs the token: once in the address, which
  sets a cookie, and then in the cookie.
* A POST request needs the CSRF token of the page, and its body is limited.
* The content-security policy allows the page's own files only.
"""

import hmac
import secrets
from collections.abc import Iterable
from typing import Final, final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSRF_HEADER: Final = "x-csrf-token"
COOKIE: Final = "dpftrl_token"
MOST_BYTES: Final = 16_384  # of the body of a request
LONGEST_TARGET: Final = 4_096  # characters of path and query
# plotly.js writes <style> elements whose text depends on its version, and style attributes, so that
# styles cannot be listed by hash. They can load nothing: images and fonts have rules of their own.
POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
# A statement is shown in the page's own frame, with nothing but its own style.
STATEMENT_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'self'"
)
HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@final
class Guards:
    """ASGI middleware that lets only allowed requests through.

    Args:
        app: The application.
        hosts: The names and addresses in `Host` headers that mean this server, without a port;
            None allows all (with a token).
        token: The token that every request needs; None for none.
        csrf: The CSRF token of the pages.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str] | None, token: str | None, csrf: str
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._token = token
        self._csrf = csrf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("content-security-policy", POLICY)
                headers.setdefault("cache-control", "no-store")
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send_with_headers)
            return
        await self._app(scope, _limited(receive), send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The response to a request that is not allowed; None if it is."""
        headers = request.headers
        if self._hosts is not None and _host(headers) not in self._hosts:
            return _refuse(421, "this server does not answer to this name; use the printed address")
        if len(request.url.path) + len(request.url.query) > LONGEST_TARGET:
            return _refuse(414, "the address is too long")
        is_link = (
            request.method == "GET"
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"} and not is_link:
            return _refuse(403, "requests from other sites are refused")
        if self._token is not None and (response := self._check_token(request)) is not None:
            return response
        if request.method in {"GET", "HEAD"}:
            return None
        if request.method != "POST":
            return _refuse(405, "only GET, HEAD and POST requests are answered")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return _refuse(403, "requests from other sites are refused")
        if not hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), self._csrf.encode()):
            return _refuse(403, "the page is too old: load it again")
        if _length(headers) > MOST_BYTES:
            return _refuse(413, f"a request may have at most {MOST_BYTES:,} bytes")
        return None

    def _check_token(self, request: Request) -> Response | None:
        """Ask for the token; a token in the address is moved to a cookie."""
        assert self._token is not None
        expected = self._token.encode()
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), expected):
            rest = [(k, v) for k, v in parse_qsl(request.url.query) if k != "token"]
            query = f"?{urlencode(rest)}" if rest else ""
            response = RedirectResponse(f"{request.url.path}{query}", status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", path="/")
            return response
        cookie = request.cookies.get(COOKIE, "")
        if hmac.compare_digest(cookie.encode(), expected):
            return None
        return _refuse(401, "open the address that dpftrl web printed: it has the token")


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_urlsafe(24)


def _host(headers: Headers) -> str:
    """The name in the `Host` header, without the port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):  # an IPv6 address
        return host.partition("]")[0].removeprefix("[")
    return host.rpartition(":")[0] if ":" in host else host


def _length(headers: Headers) -> int:
    """The length of the body, or one too many if it is not stated."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else MOST_BYTES + 1


def _limited(receive: Receive) -> Receive:
    """Like `receive`, but end the request if the body is longer than allowed."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return {"type": "http.disconnect"} if received > MOST_BYTES else message

    return receive_limited


def _refuse(status: int, text: str) -> Response:
    return PlainTextResponse(f"dpftrl: {text}\n", status_code=status)
