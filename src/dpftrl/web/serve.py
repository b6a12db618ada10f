"""Serve the page: find a free port, say the address, open a browser, and serve until Ctrl-C."""

import ipaddress
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpftrl.errors import InvalidInput

if TYPE_CHECKING:
    from starlette.applications import Starlette

SECONDS_TO_END: Final = 3  # that open connections get when the server ends


def check_extra() -> None:
    """Refuse to go on without the packages of the extra `web`.

    Raises:
        InvalidInput: One of them is not installed.
    """
    try:
        import plotly  # noqa: F401 # pyright: ignore
        import starlette  # noqa: F401 # pyright: ignore
        import uvicorn  # noqa: F401 # pyright: ignore
    except ImportError as error:
        raise InvalidInput(
            f"the web page needs other packages ({error.name}): pip install 'dpftrl[web]'"
        ) from None


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    *,
    runs: Path | None,
    state_folder: Path | None,
    host: str,
    port: int,
    token: str | None,
    on_address: Callable[[str], None],
    browser: bool,
) -> None:
    """Serve the page until the process is interrupted.

    Args:
        runs: The folder with runs to show; None to show none.
        state_folder: Folder with the witnesses of these runs; None for the default.
        host: The address to listen on.
        port: The port to listen on; 0 takes a free one.
        token: The token that every request needs; None for none.
        on_address: Called with the address of the page when it can be opened.
        browser: Whether to open it in a browser.

    Raises:
        InvalidInput: The address or the port cannot be used.
    """
    check_extra()
    from dpftrl.web.app import LOCAL_HOSTS, make_app

    hosts = (*LOCAL_HOSTS, host) if is_local(host) else None
    app = make_app(runs=runs, state_folder=state_folder, hosts=hosts, token=token)
    listener = _listen(host, port)
    try:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        address += "runs" if runs is not None else ""
        address += "" if token is None else f"?token={token}"
        on_address(address)
        if browser:
            webbrowser.open(address)
        _run(app, listener)
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot listen on {host}, port {port}: {reason}") from None


def _run(app: "Starlette", listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=64,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=SECONDS_TO_END,
        h11_max_incomplete_event_size=32_768,
        lifespan="on",
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])
