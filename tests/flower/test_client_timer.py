"""The contact timer: honest servers are never refused, dishonest ones gain little."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_apps import instruction

from dpftrl.flower.client import TOO_EARLY, WEAKER_RULE, DeviceTimer
from dpftrl.flower.messages import ContactRule, Instruction

HOUR = 3600.0
TTL = 600.0


class Clock:
    """The clock of the device."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr("time.time", fake_clock)
    return fake_clock


def by_hours(number: int, **changes: Any) -> Instruction:
    return instruction(**{"row": number, "attempt": number, "timer_hours": 2.0, **changes})


@pytest.mark.parametrize("skew", [0.0, -1e7, -300.0, 300.0, 1e7])
@pytest.mark.parametrize(("first", "second"), list(product([0.0, 1.0, TTL], repeat=2)))
def test_contacts_of_a_server_that_keeps_to_the_timer_are_never_refused(
    tmp_path: Path, clock: Clock, skew: float, first: float, second: float
) -> None:
    """For any delay of messages, and any difference between the clocks."""
    timer, start = DeviceTimer(tmp_path), 1e9
    for number, delay in enumerate([first, second, first]):
        sent = start + number * 2 * HOUR  # as soon as the server's rule allows
        clock.now = sent + delay + skew
        assert timer.accept_contact(by_hours(number), TTL) is None


@pytest.mark.parametrize("ttl", [TTL, 1e12, float("inf"), float("nan"), -1e12])
def test_a_false_ttl_shortens_the_timer_by_at_most_half(
    tmp_path: Path, clock: Clock, ttl: float
) -> None:
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(by_hours(0), ttl) is None
    least = 2 * HOUR - TTL if ttl == TTL else HOUR  # never less than half
    clock.now = 1e9 + least - 1
    assert timer.accept_contact(by_hours(1), ttl) == TOO_EARLY, "privacy"
    clock.now = 1e9 + 2 * HOUR
    assert timer.accept_contact(by_hours(1), TTL) is None, "nobody is shut out for longer"


def test_contacts_are_refused_after_the_clock_was_set_back(tmp_path: Path, clock: Clock) -> None:
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(by_hours(0), TTL) is None
    clock.now -= 1e6
    assert timer.accept_contact(by_hours(9), TTL) == TOO_EARLY


@pytest.mark.parametrize("row", [0, 3, 4, 5, 6, 7])
def test_contacts_for_earlier_rows_are_refused(tmp_path: Path, row: int) -> None:
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(instruction(row=5, attempt=5), TTL) is None
    kept = (tmp_path / "ab12.json").read_bytes()
    assert timer.accept_contact(instruction(row=row, attempt=6), TTL) == TOO_EARLY
    assert (tmp_path / "ab12.json").read_bytes() == kept
    assert timer.accept_contact(instruction(row=8, attempt=7), TTL) is None


@pytest.mark.parametrize(
    "weaker",
    [
        {"min_sep": 2},
        {"timer_hours": 1e-9},
        {"timer_hours": 1e9},
        {"rounds": 101},
        {"rounds": 10**9, "row": 10**9 - 1},
    ],
)
def test_a_run_cannot_weaken_its_first_rule(
    tmp_path: Path, clock: Clock, weaker: dict[str, Any]
) -> None:
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(instruction(), TTL) is None
    clock.now += 1e9
    kept = (tmp_path / "ab12.json").read_bytes()
    assert (
        timer.accept_contact(instruction(**{"row": 50, "attempt": 50, **weaker}), TTL)
        == WEAKER_RULE
    )
    assert timer.accept_contact(instruction(**weaker), TTL) == WEAKER_RULE, (
        "not for the same attempt either"
    )
    assert (tmp_path / "ab12.json").read_bytes() == kept
    assert timer.accept_contact(instruction(row=3, attempt=50), TTL) is None


def test_a_run_cannot_shorten_its_timer(tmp_path: Path, clock: Clock) -> None:
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(by_hours(0), TTL) is None
    clock.now += 1e6
    for weaker in ({"timer_hours": 1.9}, {"timer_hours": 0.0}):
        assert timer.accept_contact(by_hours(9, **weaker), TTL) == WEAKER_RULE


def test_a_stricter_rule_holds_for_one_contact_only(tmp_path: Path) -> None:
    """Otherwise one forged message could shut a device out."""
    timer = DeviceTimer(tmp_path)
    assert timer.accept_contact(instruction(), TTL) is None
    assert timer.accept_contact(instruction(row=3, attempt=3, min_sep=4), TTL) == TOO_EARLY
    assert timer.accept_contact(instruction(row=4, attempt=4, min_sep=4), TTL) is None
    assert timer.accept_contact(instruction(row=7, attempt=7), TTL) is None


def test_the_promised_rule_overrides_the_first_rule_of_a_run(tmp_path: Path) -> None:
    timer = DeviceTimer(tmp_path, ContactRule(3, 0.0))
    assert timer.accept_contact(instruction(min_sep=99), TTL) is None, "a message that was forged"
    assert timer.accept_contact(instruction(row=3, attempt=3), TTL) is None
    assert timer.accept_contact(instruction(row=9, attempt=9, min_sep=2), TTL) == WEAKER_RULE


def test_promised_hours_hold_across_runs(tmp_path: Path, clock: Clock) -> None:
    timer = DeviceTimer(tmp_path, ContactRule(1, 2.0))
    assert timer.accept_contact(by_hours(0), TTL) is None
    clock.now += 2 * HOUR - TTL - 1
    assert timer.accept_contact(by_hours(0, run="cd34"), TTL) == TOO_EARLY
    assert timer.accept_contact(by_hours(0), TTL) is None, "the same attempt again"
    clock.now += 1
    assert timer.accept_contact(by_hours(0, run="cd34"), TTL) is None
    assert timer.accept_contact(by_hours(1), TTL) == TOO_EARLY


def test_a_long_timer_of_the_server_does_not_shorten_the_promised_hours(
    tmp_path: Path, clock: Clock
) -> None:
    timer = DeviceTimer(tmp_path, ContactRule(1, 2.0))
    assert timer.accept_contact(by_hours(0, timer_hours=1000.0), 500 * HOUR) is None
    clock.now += HOUR - 1
    assert timer.accept_contact(by_hours(0, run="cd34"), TTL) == TOO_EARLY
    assert timer.accept_contact(by_hours(1), TTL) == TOO_EARLY
