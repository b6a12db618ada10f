"""Metrics for Prometheus, and the alerts of `deploy/alerts.yml` evaluated on them."""

import math
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from small_runs import PEOPLE, create, one_round, small_plan

from dpftrl import Server
from dpftrl.errors import InvalidInput
from dpftrl.status import StatusReader
from dpftrl.status.prometheus import FIGURES, StatusCollector, serve

pytest.importorskip("prometheus_client")

RULES = Path(__file__).parents[2] / "deploy" / "alerts.yml"
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
SELECTOR = re.compile(r'\b(dpftrl_\w+)(?:\{(\w+)=~"([^"]*)"\})?')

Samples = list[tuple[str, dict[str, str], float]]


class At:
    """A reader at another time, or with another disk."""

    def __init__(self, server: Server, **options: float):
        root = server.folder.root
        self._reader = StatusReader(root, state_folder=root.parent / "state")
        self._options = options

    def read(self):
        return self._reader.read(**self._options)


def samples(reader) -> Samples:
    families = StatusCollector(reader).collect()
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def rules() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def fires(expression: str, found: Samples, now: float) -> bool:
    """Evaluate a rule for one run; a comparison with a metric that is missing is not true."""
    known = dict[str, float]()

    def value(match: re.Match[str]) -> str:
        name, label, pattern = match.groups()
        values = [
            number
            for other, labels, number in found
            if other == name and (label is None or re.fullmatch(pattern, labels[label]))
        ]
        variable = f"v{len(known)}"
        known[variable] = max(values, default=math.nan)  # NaN makes every comparison false
        return variable

    python = SELECTOR.sub(value, expression)
    assert re.fullmatch(r"[\dv+*<>=.() -]*|(?:and|time|[\dv+*<>=.() -])*", python), python
    return bool(eval(python, {"time": lambda: now}, known))


@pytest.fixture(scope="module")
def fine(tmp_path_factory) -> Server:
    """A run without a warning, with a budget that it is far from."""
    place = tmp_path_factory.mktemp("fine")
    server = create(place, small_plan(20), key=None, budget=1e3)
    for _ in range(3):
        one_round(server)
    return server


def dropping(place: Path) -> Server:
    server = create(place, small_plan(20), key=None)
    one_round(server)
    server.abandon(server.begin(PEOPLE), "too few")
    return server


def spent(place: Path) -> Server:
    plan = small_plan(20)
    server = create(place, plan, key=None, budget=plan.guarantee.epsilon)
    while server.epsilon < 0.8 * plan.guarantee.epsilon:
        one_round(server)
    return server


def standing(place: Path) -> Server:
    server = create(place, small_plan(20, population=12), key=None)
    server.abandon(server.begin(PEOPLE[:12]), "too few")
    for _ in range(3):
        one_round(server, PEOPLE[:12])
    return server


def above_plan(place: Path) -> Server:
    """With timers in hours, clients may return sooner than planned."""
    server = create(place, small_plan(6, min_sep=2), key=None, timer_hours=1.0)
    for hour in range(6):
        one_round(server, PEOPLE[:3] if hour < 3 else PEOPLE[3:], now=2.0 * hour)
    return server


def closed(place: Path) -> Server:
    server = create(place, key=None)
    one_round(server)
    server.close()
    return server


def open_to_others(place: Path) -> Server:
    server = closed(place)
    server.folder.key.chmod(0o644)
    return server


CASES: dict[str, tuple[Callable[[Path], Server], dict[str, float]]] = {
    "DpftrlBudget": (spent, {}),
    "DpftrlEpsilonAbovePlan": (above_plan, {}),
    "DpftrlStandStill": (standing, {}),
    "DpftrlDropOut": (dropping, {}),
    "DpftrlNoRound": (spent, {"now": time.time() + 1e5}),
    "DpftrlNotRunning": (closed, {}),
    "DpftrlDisk": (closed, {"free_bytes": 100}),
    "DpftrlFiles": (open_to_others, {}),
}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_for_its_reason(tmp_path, alert):
    make, options = CASES[alert]
    server = make(tmp_path)
    found = samples(At(server, **options))
    assert fires(rules()[alert], found, options.get("now", time.time()))
    server.close()


def test_an_unreadable_run_is_a_metric_and_an_alert(tmp_path):
    server = closed(tmp_path)
    reader = At(server)
    assert not fires(rules()["DpftrlUnreadable"], samples(reader), time.time())
    server.folder.journal.write_bytes(b"damaged\n")
    found = samples(reader)
    assert found == [("dpftrl_private_readable", {}, 0.0)]
    assert [alert for alert, expr in rules().items() if fires(expr, found, time.time())] == [
        "DpftrlUnreadable"
    ]


def test_a_run_that_is_fine_fires_no_alert(fine):
    found = samples(At(fine))
    # Just after a round: rounds of a test are so short that any pause is longer than five of them.
    (now,) = (v for name, _, v in found if name == "dpftrl_private_last_round_timestamp_seconds")
    assert [alert for alert, expr in rules().items() if fires(expr, found, now)] == []
    late = [alert for alert, expr in rules().items() if fires(expr, found, now + 1e6)]
    assert late == ["DpftrlNoRound"]  # the control


def test_every_alert_has_a_case():
    assert set(rules()) == {*CASES, "DpftrlUnreadable"}


def test_every_metric_of_every_rule_is_exported(fine):
    """Also those that are left out while they are not known."""
    exported = {name for name, _, _ in samples(At(fine))} | set(FIGURES)
    used = {name for expr in rules().values() for name, *_ in SELECTOR.findall(expr)}
    assert len(used) > 12
    assert used <= exported
    assert not {"dpftrl_no_such_metric"} <= exported  # the control


def test_every_metric_is_documented_and_says_whether_it_is_private(fine):
    text = DOCS.read_text()
    for name, labels, _ in samples(At(fine)):
        assert f"`{name}`" in text, name
        assert name == "dpftrl_private_readable" or labels["run"] == fine.run_id
    for name, (place, _) in FIGURES.items():
        assert name.startswith("dpftrl_private_") == place.startswith("private.")
        assert f"`{name}`" in text, name


def test_figures_that_are_not_known_are_left_out(tmp_path):
    with create(tmp_path, key=None) as server:
        names = {name for name, _, _ in samples(At(server))}
    assert "dpftrl_rounds" in names
    for name in ("epsilon_budget", "private_drop_out", "private_seconds_per_round"):
        assert f"dpftrl_{name}" not in names


def test_metrics_are_served_on_a_free_port(fine):
    server = serve(At(fine), "127.0.0.1", 0)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        text = urllib.request.urlopen(address, timeout=30).read().decode()
        with pytest.raises(InvalidInput, match="cannot listen"):
            serve(At(fine), "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    assert f'dpftrl_rounds{{run="{fine.run_id}"}} 3.0' in text
    assert "# TYPE dpftrl_epsilon gauge" in text
    assert f'dpftrl_private_warning{{kind="disk",run="{fine.run_id}"}} 0.0' in text
    assert "python_info" not in text  # nothing about this process
