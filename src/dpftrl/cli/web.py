"""`dpftrl web`: the planner and the live view of runs, as a web page."""

from pathlib import Path

import click

from dpftrl.cli.options import state_folder_option
from dpftrl.cli.output import say
from dpftrl.errors import InvalidInput
from dpftrl.web.serve import check_extra, is_local, serve


@click.command("web")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Folder with runs, or one run: also show how they are doing.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Anything but this machine needs a token, which is printed.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="Port to listen on.  [default: a free one]",
)
@click.option(
    "--token",
    "with_token",
    is_flag=True,
    help="Ask for a token on 127.0.0.1 too: other users of this machine can reach it.",
)
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
@state_folder_option
def web_command(
    runs: Path | None,
    host: str,
    port: int,
    with_token: bool,
    no_browser: bool,
    state_folder: Path | None,
) -> None:
    """Open a web page that plans a training, and shows how runs are doing.

    The page has the numbers of `dpftrl plan`, `dpftrl status`, `dpftrl statement` and
    `dpftrl verify`. It works without a network. Ctrl-C ends it.

    With --host, other machines can reach the page. They need the token in the printed address.
    The connection is not encrypted: put a proxy with TLS in front of it.

    \b
    dpftrl web
    dpftrl web --runs out --no-browser
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)
    check_extra()
    if runs is not None and not runs.is_dir():
        raise InvalidInput(f"{runs} is not a folder; --runs takes a folder with runs")
    from dpftrl.web.guards import new_secret

    serve(
        runs=runs,
        state_folder=state_folder,
        host=host,
        port=port,
        token=new_secret() if with_token or not is_local(host) else None,
        on_address=lambda address: say(f"dpftrl web: {address} (Ctrl-C ends this)"),
        browser=not no_browser,
    )
