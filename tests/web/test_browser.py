"""The page in a real browser: headless Chromium, driven by playwright.

Every test ends with two checks: nothing was written to the console, and no request left the
machine.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dpftrl.web.form import FIELDS

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
HERE = Path(__file__).parent
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 240_000.0  # milliseconds that a page may take on a busy machine
SMALL = {"population": "5700", "report_goal": "10", "rounds": "60", "epsilon": "2", "delta": "1e-5"}
FLEET = "/?mode=fleet&" + "&".join(f"{name}={value}" for name, value in SMALL.items())
DATASET = "/?mode=dataset&size=400&batch_size=40&epochs=2&epsilon=2&delta=1e-4&sampling=none"


@contextlib.contextmanager
def program(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this folder, and end it by its own process id."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / name), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def address(place) -> Iterator[str]:
    with program("served_page.py", str(place)) as process:
        yield said(process).removesuffix("/runs")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Visit:
    """A page, with what it wrote to the console and which hosts it asked."""

    def __init__(self, browser, address: str, **options):
        self.context = browser.new_context(accept_downloads=True, **options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.address = address
        self.console, self.hosts = list[str](), set[str]()
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", self._note)

    def _note(self, request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob"}:
            self.hosts.add(parts.netloc)

    def open(self, path: str) -> None:
        self.page.goto(self.address + path)

    def answered(self) -> None:
        """Wait until the newest answer is shown, with its figures."""
        self.page.wait_for_function(
            """() => document.querySelector('#headline').getAttribute('aria-busy') === 'false'
            && document.querySelector('#figures').getAttribute('aria-busy') === 'false'
            && document.querySelector('#headline .chosen')"""
        )

    def settle(self, action) -> dict:
        """Do something, and return the answer that the page gets for it."""
        with self.page.expect_response(lambda response: response.url.endswith("/api/plan")) as got:
            action()
        return got.value.json()

    def error_of(self, name: str, mode: str = "fleet") -> str:
        place = self.page.locator(f"#{mode}-{name}-error")
        place.filter(has_text=" ").wait_for()
        return place.inner_text()

    def check(self) -> None:
        assert self.console == []
        assert self.hosts == {urlsplit(self.address).netloc}


@pytest.fixture
def visit(browser, address) -> Iterator[Visit]:
    opened = Visit(browser, address)
    yield opened
    opened.check()
    opened.context.close()


def test_a_plan_is_shown_with_its_figures(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    assert page.locator("#headline .chosen").inner_text() == "blt"
    text = page.locator("#headline").inner_text()
    for part in ("epsilon per device", "epsilon per person", "days of training", "min-sep"):
        assert part in text
    assert "An attack with a false-alarm rate of 0.1%" in text
    assert "Nothing enforces it" in text
    assert page.locator("figure .main-svg").count() >= 7
    assert page.locator("tr.marked").first.inner_text().startswith("blt *")


def test_every_input_of_a_fleet_changes_the_request(visit):
    other = {
        "population": "6800",
        "availability": "80%",
        "report_goal": "12",
        "timer_days": "2",
        "rounds_per_day": "10",
        "rounds": "50",
        "devices": "3",
        "epsilon": "3",
        "delta": "2e-6",
        "parameters": "2M",
        "min_sep": "5:9",
        "max_participations": "4",
        "over_selection": "1.2",
        "buffers": "2",
        "objective": "max",
    }
    left = {field.name for field in FIELDS["fleet"]} - set(other)
    assert left == {"days", "noise_multiplier"}  # these replace rounds and epsilon: see below
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    page.locator("#fleet summary").click()
    for name, value in other.items():
        if name == "rounds_per_day":
            page.fill("#fleet-timer_days", "")
        if name == "objective":
            page.select_option("#fleet-objective", value)
        else:
            page.fill(f"#fleet-{name}", value)
        if name == "timer_days":
            assert "rounds_per_day" in visit.error_of("timer_days")
            continue
        page.wait_for_function("text => location.search.includes(text)", arg=f"{name}=")
    page.fill("#fleet-timer_days", "2")
    page.wait_for_function(
        "() => document.querySelector('#command').textContent.includes('--objective max')"
        " && document.querySelector('#command').textContent.includes('--timer-days 2')"
    )
    command = page.locator("#command").inner_text()
    for field in FIELDS["fleet"]:
        if field.name in other:
            assert f"{field.flag} {other[field.name]}" in command
    page.fill("#fleet-rounds", "")
    page.fill("#fleet-days", "6")
    page.fill("#fleet-epsilon", "")
    page.fill("#fleet-noise_multiplier", "4")
    page.wait_for_function(
        "() => /--days 6 .*--noise-multiplier 4/"
        ".test(document.querySelector('#command').textContent)"
    )
    visit.answered()


def test_both_modes(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    with page.expect_response(lambda response: "/api/plan" in response.url) as got:
        page.get_by_role("button", name="A data set").click()
    assert page.locator("#fleet").is_hidden()
    assert page.get_by_role("button", name="A data set").get_attribute("aria-pressed") == "true"
    assert got.value.request.post_data_json["mode"] == "dataset"
    visit.open(DATASET)
    visit.answered()
    assert "blt with none sampling" in page.locator("#headline .reason").inner_text()
    for name, value in (("size", "500"), ("batch_size", "50"), ("epochs", "3"), ("epsilon", "3")):
        visit.settle(lambda: page.fill(f"#dataset-{name}", value))  # noqa: B023
        visit.answered()
    answer = visit.settle(lambda: page.fill("#dataset-delta", "1e-5"))
    assert (answer["answer"]["dataset"], answer["answer"]["epochs"]) == (500, 3)
    page.select_option("#dataset-sampling", "poisson")
    page.wait_for_function(
        "() => document.querySelector('#headline').innerText.includes('poisson')"
    )
    page.locator("#dataset summary").click()
    page.fill("#dataset-max_batch_size", "60")
    assert "too often" in visit.error_of("max_batch_size", "dataset")
    page.fill("#dataset-max_batch_size", "200")
    page.wait_for_function(
        "() => document.querySelector('#command').textContent.includes('--max-batch-size 200')"
    )


def test_sliders_work_with_the_keyboard(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    slider = page.locator("#fleet").get_by_label("Target epsilon, slider")
    slider.focus()

    def move() -> None:
        for _ in range(20):
            page.keyboard.press("ArrowRight")

    visit.settle(move)
    page.wait_for_function("() => Number(document.querySelector('#fleet-epsilon').value) > 2.05")
    visit.answered()
    value = page.input_value("#fleet-epsilon")
    assert slider.get_attribute("aria-valuetext") == value
    assert f"--epsilon {value}" in page.locator("#command").inner_text()


def test_a_link_shares_the_whole_plan(visit, browser, address):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    visit.settle(lambda: page.fill("#fleet-devices", "3"))
    visit.answered()
    page.get_by_role("button", name="Copy a link to this plan").click()
    link = page.evaluate("() => navigator.clipboard.readText()")
    assert parse_qs(urlsplit(link).query)["devices"] == ["3"]
    other = Visit(browser, address)
    other.page.goto(link)
    other.answered()
    for field in FIELDS["fleet"]:
        selector = f"#fleet-{field.name}"
        assert other.page.input_value(selector) == page.input_value(selector)
    first, second = (one.locator("#headline").inner_text() for one in (page, other.page))
    assert first == second
    other.check()
    other.context.close()


def test_errors_are_shown_beside_the_field(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    for name, value, text in (
        ("population", "many", "not a number"),
        ("delta", "7", "between 0 and 1"),
        ("report_goal", "1M", "one round contacts"),
    ):
        page.fill(f"#fleet-{name}", value)
        assert text in visit.error_of(name).lower() + visit.error_of(name)
        assert page.get_attribute(f"#fleet-{name}", "aria-invalid") == "true"
        page.fill(f"#fleet-{name}", SMALL[name])
        page.locator(f"#fleet-{name}-error:empty").wait_for(state="attached")
    visit.answered()
    assert page.locator('[aria-invalid="true"]').count() == 0


def test_downloads(visit, tmp_path):
    visit.open(FLEET)
    visit.answered()
    page = visit.page

    def saved(action) -> bytes:
        with page.expect_download() as got:
            action()
        path = tmp_path / got.value.suggested_filename
        got.value.save_as(path)
        return path.read_bytes()

    figure = page.locator('[data-figure="epsilon-by-min-sep"]')
    png = saved(lambda: figure.get_by_role("button", name="PNG").click())
    assert png.startswith(b"\x89PNG")
    svg = saved(lambda: figure.get_by_role("button", name="SVG").click())
    assert svg.startswith(b"<svg")
    assert b"equal utility" in svg
    table = saved(lambda: figure.get_by_role("button", name="CSV").click()).decode()
    assert table.splitlines()[0].startswith("series,min-sep (rounds)")
    assert len(table.splitlines()) > 30
    assert page.locator("figure").get_by_role("button", name="CSV").count() == 7
    plan = saved(lambda: page.get_by_role("link", name="Plan (plan.json)").click())
    assert json.loads(plan)["format"] == "dpftrl plan"
    chosen = saved(lambda: page.get_by_role("link", name="Mechanism").click())
    assert json.loads(chosen)["format"] == "dpftrl mechanism"
    text = saved(lambda: page.get_by_role("link", name="Draft statement (Markdown)").click())
    assert b"# Privacy statement" in text
    html = saved(lambda: page.get_by_role("link", name="Draft statement (HTML)").click())
    assert b"<h1" in html
    page.locator("#copy-command").click()
    command = page.evaluate("() => navigator.clipboard.readText()")
    assert command == page.locator("#command").inner_text()
    assert command.startswith("dpftrl plan --population 5700 ")


def test_a_long_computation_runs_in_the_background(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    assert "left out of a quick answer" in page.locator("#tables").inner_text()
    page.get_by_role("button", name="Also optimise BandMF").click()
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_text("This is the full comparison.").wait_for()
    table = page.locator("#tables section").first.inner_text()
    assert "bandmf" in table
    assert "--effort slow" in page.locator("#command").inner_text()
    link = page.get_by_role("link", name="Plan (plan.json)").get_attribute("href")
    assert link.startswith("/api/jobs/")


def test_a_preset_fills_in_the_form_and_shows_both_numbers(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    assert page.locator("#preset option").count() == 11  # ten rows, and none
    page.select_option("#preset", label="pt-PT, tree, noise multiplier 7")
    page.get_by_text("Why they differ").wait_for()
    card = page.locator("#preset-card").inner_text()
    for part in ("1.33", "0.4388", "11.27", "6.09", "does not reproduce", "43 / (2 x 49)"):
        assert part in card
    assert page.input_value("#fleet-rounds") == "430"
    visit.answered()
    assert "preset=7" in page.url


def test_a_live_run(visit, place):
    page = visit.page
    with program("growing_run.py", str(place)) as training:
        assert said(training) == "ready"

        def train(rounds: int) -> None:
            for _ in range(rounds):
                training.stdin.write("\n")
                training.stdin.flush()
                said(training)

        train(2)
        visit.open("/runs")
        page.get_by_role("link", name="run", exact=True).click()
        page.get_by_text("2 of 8 (25%)").first.wait_for()
        assert page.locator("#verify").is_disabled()
        train(3)
        page.get_by_text("5 of 8 (62%)").first.wait_for()
        page.get_by_text("25.00%").wait_for()
        text = page.locator("main").inner_text()
        for part in (
            "eligible clients",
            "expected end",
            "of the budget of 40",
            "Not to be published",
        ):
            assert part in text
        assert page.locator("figure .main-svg").count() >= 2
        train(3)
        page.get_by_text("Ended: all 8 rounds are done.").wait_for()
        training.wait()
    page.locator("#verify:enabled").wait_for()
    page.locator("#verify").click()
    page.locator("#verdict .passed, #verdict .warning").wait_for()
    assert "8 rounds, epsilon" in page.locator("#verdict").inner_text()
    with visit.context.expect_page() as opened:
        page.get_by_role("link", name="Open the statement").click()
    opened.value.get_by_role("heading", name="Privacy statement").wait_for()


def test_a_phone_needs_no_sideways_scrolling(browser, address):
    phone = Visit(
        browser,
        address,
        viewport={"width": 360, "height": 740},
        color_scheme="dark",
        has_touch=True,
    )
    phone.open(FLEET)
    phone.answered()
    assert phone.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    background = phone.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(15, 19, 24)"
    phone.check()
    phone.context.close()


def test_a_screen_reader_finds_everything(visit):
    visit.open(FLEET)
    visit.answered()
    page = visit.page
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('input, select, button, a, progress, table')]
        .filter((one) => !one.closest('[hidden]') && !one.labels?.length
          && !one.getAttribute('aria-label') && !one.textContent.trim()).length"""
    )
    assert unnamed == 0
    assert page.locator("#headline").get_attribute("aria-live") == "polite"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    order = list[str]()
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(page.evaluate("() => document.activeElement.id"))
    assert "preset" in order
    assert "fleet-population" in order


def test_other_sites_are_asked_for_nothing_even_if_a_script_tries(visit):
    """The negative control of the policy: an image and a script of elsewhere are not loaded."""
    visit.open(FLEET)
    visit.answered()
    blocked = visit.page.evaluate(
        """() => new Promise((done) => {
          const seen = [];
          document.addEventListener('securitypolicyviolation', (event) => {
            seen.push(event.effectiveDirective);
            if (seen.length === 2) done(seen.sort());
          });
          const image = new Image(); image.src = 'http://192.0.2.1/x.png';
          const script = document.createElement('script');
          script.textContent = 'window.wasRun = true'; document.body.append(script);
        })"""
    )
    assert blocked == ["img-src", "script-src-elem"]
    assert visit.page.evaluate("() => window.wasRun") is None
    visit.console.clear()
    visit.hosts.discard("192.0.2.1")
