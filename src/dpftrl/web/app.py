"""The application: which address gives what.

GET requests change nothing. POST requests compute (`/api/plan`), start or cancel a computation in
the background (`/api/jobs`), or start the verification of a run.
"""

import asyncio
import base64
import contextlib
import html
import json
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, get_args

import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dpftrl import __version__
from dpftrl.errors import DpftrlError
from dpftrl.plan.request import Effort
from dpftrl.web.answers import FILES
from dpftrl.web.form import FIELDS, Field, FieldError, Form
from dpftrl.web.guards import STATEMENT_POLICY, Guards, new_secret
from dpftrl.web.jobs import Job, Jobs, TooManyJobs
from dpftrl.web.presets import presets
from dpftrl.web.runs import Run, Runs
from dpftrl.web.worker import TaskFailed, Worker

STATIC: Final = Path(__file__).parent / "static"
ASSETS: Final = {
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "planner.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
    "runs.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
}
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
LIVE_SECONDS: Final = 60.0  # an answer while a slider moves; it takes less than one if all is well
FIGURE_SECONDS: Final = 180.0  # answers with figures, quick answers for data sets, and files
CACHED: Final = {"cache-control": "public, max-age=31536000, immutable"}
WARM_UP: Final = {"mode": "fleet", "values": {f.name: f.default for f in FIELDS["fleet"]}}


def make_app(
    *,
    runs: Path | None = None,
    state_folder: Path | None = None,
    hosts: tuple[str, ...] | None = LOCAL_HOSTS,
    token: str | None = None,
) -> Starlette:
    """The web application.

    Args:
        runs: The folder with runs to show; None to show none.
        state_folder: Folder with the witnesses of these runs; None for the default.
        hosts: The names that mean this server in `Host` headers; None allows all.
        token: The token that every request needs; None for none.

    Raises:
        InvalidInput: The folder does not exist.
    """
    csrf = new_secret()
    pages = _Pages(csrf, Runs(runs.resolve(), state_folder) if runs is not None else None)
    routes = [
        Route("/", pages.planner),
        Route("/runs", pages.list_runs),
        Route("/runs/{run}", pages.show_run),
        Route("/runs/{run}/statement", pages.run_statement),
        Route("/static/{name}", pages.asset),
        Route("/plotly/{version}.js", pages.plotly),
        Route("/api/plan", pages.plan, methods=["POST"]),
        Route("/api/presets/{number:int}", pages.preset, methods=["POST"]),
        Route("/download/{name}", pages.download),
        Route("/api/jobs", pages.start_job, methods=["POST"]),
        Route("/api/jobs/{job}", pages.show_job),
        Route("/api/jobs/{job}/cancel", pages.cancel_job, methods=["POST"]),
        Route("/api/jobs/{job}/{name}", pages.job_file),
        Route("/api/runs", pages.runs_data),
        Route("/api/runs/{run}", pages.run_data),
        Route("/runs/{run}/verify", pages.verify, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guards, hosts=hosts, token=token, csrf=csrf)],
        exception_handlers={HTTPException: _http_error, Exception: _failure},
        lifespan=pages.lifespan,
    )


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"dpftrl: {error.detail}\n", status_code=error.status_code)


async def _failure(_: Request, __: Exception) -> Response:
    return PlainTextResponse("dpftrl: this request failed; see the terminal\n", status_code=500)


class _Json(JSONResponse):
    """JSON without NaN and infinities, which browsers do not read."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def _error(error: Exception, status: int = 200) -> Response:
    """An error for the user to read. A wrong field is a normal answer: the request was fine."""
    content = {"message": str(error), "field": getattr(error, "field", "")}
    return _Json({"error": content}, status_code=status)


class _Pages:
    """The handlers of all addresses, and what they share."""

    def __init__(self, csrf: str, runs: Runs | None):
        self._csrf = csrf
        self._runs = runs

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        """Start the processes that compute, and end them with the server."""
        self._live, self._figures = Worker(LIVE_SECONDS), Worker(FIGURE_SECONDS)
        self._jobs = Jobs()
        # The first answer compiles and imports; nobody has to wait for it.
        workers = (self._live, self._figures)
        starting = [asyncio.create_task(_warm_up(worker)) for worker in workers]
        try:
            yield
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._jobs.stop()
            for worker in workers:
                await worker.stop()

    async def planner(self, _: Request) -> Response:
        """The planner page."""
        options = "".join(
            f'<option value="{one["number"]}">{html.escape(one["title"])}</option>'
            for one in presets()
        )
        forms = {
            f"{mode}_{part}": "".join(
                _field(field, mode) for field in fields if field.advanced == (part == "advanced")
            )
            for mode, fields in FIELDS.items()
            for part in ("main", "advanced")
        }
        return self._page(
            "planner.html", "Planner", presets=options, preset_data=_script_data(presets()), **forms
        )

    def _page(self, name: str, title: str, **parts: str) -> Response:
        parts |= {
            "title": title,
            "csrf": self._csrf,
            "version": __version__,
            "plotly": _plotly()[0],
            "runs_link": '<a href="/runs">Runs</a>' if self._runs is not None else "",
        }
        layout, body = _template("layout.html"), _template(name)
        for key, value in parts.items():
            body = body.replace(f"{{{{{key}}}}}", value)
            layout = layout.replace(f"{{{{{key}}}}}", value)
        return HTMLResponse(layout.replace("{{body}}", body))

    async def asset(self, request: Request) -> Response:
        """One of the page's own files."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, "there is no such file")
        content = (STATIC / name).read_bytes()
        return Response(content, media_type=ASSETS[name], headers={"cache-control": "no-cache"})

    async def plotly(self, _: Request) -> Response:
        """plotly.js, from the installed package."""
        return Response(_plotly()[1], media_type="text/javascript; charset=utf-8", headers=CACHED)

    async def plan(self, request: Request) -> Response:
        """Answer a form: the numbers of `dpftrl plan --effort quick`."""
        try:
            content = await _body(request)
            form = Form.read(content)
            figures = content.get("figures") is True
            task = {"kind": "answer", "form": _plain(form), "effort": "quick", "figures": figures}
            is_live = form.mode == "fleet" and not figures
            worker = self._live if is_live else self._figures
            return _Json(await worker.ask(task))
        except (FieldError, TaskFailed) as error:
            return _error(error)

    async def preset(self, request: Request) -> Response:
        """Recompute a row of the paper's table, in the background if that takes long."""
        number = request.path_params["number"]
        chosen = next((one for one in presets() if one["number"] == number), None)
        if chosen is None:
            raise HTTPException(404, "there is no such preset")
        task = {"kind": "preset", "number": number}
        if chosen["is_slow"]:
            return self._start(task)
        try:
            return _Json({"state": "done", "result": await self._figures.ask(task)})
        except TaskFailed as error:
            return _error(error)

    async def download(self, request: Request) -> Response:
        """A file for a form in the address; it is computed again."""
        name = request.path_params["name"]
        if name not in FILES:
            raise HTTPException(404, "there is no such file")
        query = dict(request.query_params)
        mode = query.pop("mode", "fleet")
        try:
            form = Form.read({"mode": mode, "values": query})
            task = {"kind": "file", "form": _plain(form), "effort": "quick", "name": name}
            return _attachment(await self._figures.ask(task))
        except (FieldError, TaskFailed) as error:
            return PlainTextResponse(f"dpftrl: {error}\n", status_code=422)

    async def start_job(self, request: Request) -> Response:
        """Start a long computation in the background."""
        try:
            content = await _body(request)
            form = Form.read(content)
            effort = _effort(content)
            form.request(effort, extrapolate=False)  # a wrong field is reported at once
        except FieldError as error:
            return _error(error)
        return self._start({"kind": "job", "form": _plain(form), "effort": effort})

    def _start(self, task: dict[str, Any]) -> Response:
        try:
            return _Json(self._jobs.start(task).as_json(), status_code=202)
        except TooManyJobs as error:
            return _error(error, 429)

    def _job(self, request: Request) -> Job:
        job = self._jobs.find(request.path_params["job"])
        if job is None:
            raise HTTPException(404, "there is no such computation any more")
        return job

    async def show_job(self, request: Request) -> Response:
        """How far a computation is, and its result."""
        return _Json(self._job(request).as_json())

    async def cancel_job(self, request: Request) -> Response:
        """End a computation."""
        job = self._job(request)
        self._jobs.cancel(job)
        return _Json(job.as_json())

    async def job_file(self, request: Request) -> Response:
        """A file of the result of a computation."""
        job, name = self._job(request), request.path_params["name"]
        files: dict[str, Any] = job.result.get("files", {}) if job.state == "done" else {}
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return _attachment(files[name])

    async def list_runs(self, _: Request) -> Response:
        """The page with all runs."""
        self._need_runs()
        return self._page("runs.html", "Runs")

    async def runs_data(self, _: Request) -> Response:
        """All runs as data."""
        runs = self._need_runs()

        def read() -> list[dict[str, Any]]:
            return [run.row() for run in runs.all()]

        return _Json({"runs": await anyio.to_thread.run_sync(read)})

    async def show_run(self, request: Request) -> Response:
        """The page of one run."""
        run = await self._run(request)
        return self._page(
            "run.html", "Run", run=run.number, run_name=html.escape(run.name, quote=True)
        )

    async def run_data(self, request: Request) -> Response:
        """The status of one run as data."""
        run = await self._run(request)
        return await _read(run.view, _Json)

    async def run_statement(self, request: Request) -> Response:
        """The statement of one run."""
        run = await self._run(request)

        def shown(text: str) -> Response:
            return HTMLResponse(text, headers={"content-security-policy": STATEMENT_POLICY})

        return await _read(run.statement, shown)

    async def verify(self, request: Request) -> Response:
        """Start the verification of a run in the background."""
        run = await self._run(request)
        try:
            if await anyio.to_thread.run_sync(run.is_running):
                return _error(DpftrlError("a process works on this run: verify it afterwards"), 409)
        except DpftrlError:
            pass  # what cannot be read is what verification is for
        return self._start(run.verify_task())

    def _need_runs(self) -> Runs:
        if self._runs is None:
            raise HTTPException(404, "start `dpftrl web --runs DIR` to see runs")
        return self._runs

    async def _run(self, request: Request) -> Run:
        runs = self._need_runs()
        run = await anyio.to_thread.run_sync(runs.find, request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run


async def _warm_up(worker: Worker) -> None:
    task = {"kind": "answer", "form": WARM_UP, "effort": "quick", "figures": False}
    with contextlib.suppress(TaskFailed):
        await worker.ask(task)


async def _read(read: Callable[[], Any], respond: Callable[[Any], Response]) -> Response:
    """The response with what a function reads from files, in a thread."""
    try:
        return respond(await anyio.to_thread.run_sync(read))
    except DpftrlError as error:
        return _error(error, 409)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        FieldError: It is something else.
    """
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise FieldError("", "the request is not JSON") from None
    if not isinstance(content, dict):
        raise FieldError("", "send an object with mode and values")
    return content  # pyright: ignore[reportUnknownVariableType]


def _effort(content: dict[str, Any]) -> Effort:
    efforts: dict[str, Effort] = {name: name for name in get_args(Effort)}
    effort = efforts.get(str(content.get("effort")))
    if effort is None:
        raise FieldError("", f"effort must be one of {', '.join(efforts)}")
    return effort


def _plain(form: Form) -> dict[str, Any]:
    return {"mode": form.mode, "values": dict(form.values)}


def _attachment(file: dict[str, str]) -> Response:
    """A file to save; a browser never shows it as a page of this server."""
    return Response(
        base64.b64decode(file["content"]),
        media_type=file["media_type"],
        headers={
            "content-disposition": f'attachment; filename="{file["name"]}"',
            "content-security-policy": STATEMENT_POLICY,
        },
    )


@lru_cache
def _template(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@lru_cache
def _plotly() -> tuple[str, str]:
    """The version of plotly.js, and its text."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    return get_plotlyjs_version(), get_plotlyjs()


def _script_data(content: Any) -> str:
    """JSON inside an element of a page: `<` would end it."""
    return msgspec.json.encode(content).decode().replace("<", "\\u003c")


def _field(field: Field, mode: str) -> str:
    """The HTML of one field: label, help, text field or choice, slider, and place for an error."""
    name, label, own = field.name, html.escape(field.label), f"{mode}-{field.name}"
    describe = f'aria-describedby="{own}-help {own}-error"'
    if field.kind == "choice":
        options = "".join(
            f'<option value="{value}"{" selected" if value == field.default else ""}>'
            f"{html.escape(text)}</option>"
            for value, text in field.choices
        )
        control = f'<select id="{own}" name="{name}" {describe}>{options}</select>'
    else:
        control = (
            f'<input id="{own}" name="{name}" type="text" inputmode="decimal" autocomplete="off" '
            f'spellcheck="false" value="{html.escape(field.default)}" {describe} '
            f'placeholder="{"" if field.default else "chosen"}">'
        )
    slider = ""
    if field.low is not None and field.high is not None:
        slider = (
            f'<input type="range" min="0" max="1000" value="0" data-for="{name}" '
            f'data-low="{field.low:g}" data-high="{field.high:g}" data-kind="{field.kind}" '
            f'aria-label="{label}, slider">'
        )
    return (
        f'<div class="field" data-field="{name}"><label for="{own}">{label}</label>{control}'
        f'{slider}<p class="help" id="{own}-help">{html.escape(field.help)}</p>'
        f'<p class="error" id="{own}-error" role="alert"></p></div>'
    )
