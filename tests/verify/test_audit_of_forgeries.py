"""Who has the key can make all digests fit. What they then say must still be sound."""

import math

import pytest
from audited_runs import PLAN, Place, failed, made, play, records, rewrite, split

from dpftrl.verify.gaussian import epsilon_of
from dpftrl.verify.journal import Journal, read_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Place:
    place = made(tmp_path_factory.mktemp("original"), 5, budget=1000.0)
    with place.open() as server:
        play(server, abandon=True)
        play(server)
    return place


@pytest.fixture
def place(original, tmp_path) -> Place:
    return original.copy_to(tmp_path)


def cohorts(said: list[dict]) -> list[dict]:
    return [record for record in said if record["kind"] == "cohort"]


def commits(said: list[dict]) -> list[dict]:
    return [record for record in said if record["kind"] == "committed"]


def test_a_faithful_copy_passes(place):
    """The negative control of everything below."""
    rewrite(place, records(place))
    assert failed(place.audit()) == {}


def test_a_client_that_came_too_early(place):
    said = records(place)
    first, second = cohorts(said)[1], cohorts(said)[3]
    early = split(first["clients"])[0]
    others = split(second["clients"])[1:]
    second["clients"] = "".join(sorted([early, *others]))
    rewrite(place, said)
    found = failed(place.audit())
    assert "rows 1 and 3" in found["timers"]
    assert set(found) <= {"timers", "cap", "what happened"}  # every digest fits


def test_a_client_that_came_too_early_to_an_abandoned_attempt(place):
    said = records(place)
    abandoned = next(record for record in said if record["kind"] == "abandoned")
    target = cohorts(said)[abandoned["attempt"]]
    before = cohorts(said)[abandoned["attempt"] - 1]
    moved = [split(before["clients"])[0], *split(target["clients"])[1:]]
    target["clients"] = "".join(sorted(moved))
    rewrite(place, said)
    assert "timers" in failed(place.audit())


def test_a_client_in_every_round_moves_the_release_too_far(place):
    said = records(place)
    for cohort in cohorts(said):
        cohort["clients"] = "".join(["0" * 16, *split(cohort["clients"])[1:]])
    rewrite(place, said)
    assert {"timers", "cap", "what happened"} <= set(failed(place.audit()))


def test_a_client_twice_in_a_cohort(place):
    said = records(place)
    clients = split(cohorts(said)[2]["clients"])
    cohorts(said)[2]["clients"] = "".join([clients[0], clients[0], *clients[2:]])
    rewrite(place, said)
    assert "rising order" in failed(place.audit())["journal"]


def test_too_many_clients_or_reports(place):
    said = records(place)
    cohorts(said)[2]["clients"] += "f" * 16
    rewrite(place, said)
    assert "cohorts" in failed(place.audit())
    said = records(place)
    cohorts(said)[2]["clients"] = cohorts(said)[2]["clients"][:-16]
    commits(said)[2]["reports"] = 4
    rewrite(place, said)
    assert "report goal" in failed(place.audit())["cohorts"]


@pytest.mark.parametrize(
    "statuses",
    [
        ["counted", "counted", "contacted", "contacted"],
        ["counted", "counted", "counted", "counted"],
        ["counted", "counted", "counted", "abandoned"],
        ["counted", "counted", "counted", "unheard"],
    ],
    ids=lambda statuses: statuses[-1] + statuses[2],
)
def test_a_ledger_that_contradicts_the_journal(place, statuses):
    rewrite(place, records(place), {2: statuses})
    assert "attempt 2" in failed(place.audit())["ledger"]


def test_an_abandoned_attempt_that_counts(place):
    said = records(place)
    attempt = next(record for record in said if record["kind"] == "abandoned")["attempt"]
    rewrite(place, said, {attempt: ["counted"] + ["abandoned"] * 3})
    assert "abandoned" in failed(place.audit())["ledger"]


def test_an_epsilon_that_does_not_follow(place):
    for factor in (0.9, 1 - 1e-6, 1 + 1e-5, 2.0):
        said = records(place)
        commits(said)[-1]["epsilon"] *= factor
        rewrite(place, said)
        assert "journalled epsilon" in failed(place.audit())
        commits(said)[-1]["epsilon"] /= factor
        rewrite(place, said)
    assert failed(place.audit()) == {}


def test_an_epsilon_that_falls(place):
    said = records(place)
    commits(said)[1]["epsilon"] *= 5
    rewrite(place, said)
    assert "epsilon falls at row 2" in failed(place.audit())["journalled epsilon"]


def swapped(said: list[dict]) -> None:
    said[1], said[3] = said[3], said[1]


def skipped_row(said: list[dict]) -> None:
    said[3]["row"] = said[4]["row"] = 2


def no_cohort(said: list[dict]) -> None:
    del said[3]


def no_end(said: list[dict]) -> None:
    del said[4]


def twice_created(said: list[dict]) -> None:
    said.append(said[0])


def never_created(said: list[dict]) -> None:
    del said[0]


def other_attempt(said: list[dict]) -> None:
    said[4]["attempt"] = 7


def unknown_field(said: list[dict]) -> None:
    said[1]["more"] = 1


def negative(said: list[dict]) -> None:
    said[2]["reports"] = -3


@pytest.mark.parametrize(
    "edit",
    [
        swapped,
        skipped_row,
        no_cohort,
        no_end,
        twice_created,
        never_created,
        other_attempt,
        unknown_field,
        negative,
    ],
)
def test_a_journal_that_makes_no_sense(place, edit):
    said = records(place)
    edit(said)
    rewrite(place, said)
    assert "line" in failed(place.audit())["journal"]


def timed(root) -> Place:
    place = made(root, 0, timer_hours=2.0)
    with place.open() as server:
        for number in range(6):
            play(server, now=0.7 * number)
    assert failed(place.audit()) == {}
    return place


def test_a_client_that_came_too_early_by_time(tmp_path):
    place = timed(tmp_path)
    said = records(place)
    for cohort in cohorts(said):
        cohort["time"] *= 0.5
    rewrite(place, said)
    assert "the timer is 2 hours" in failed(place.audit())["timers"]


def test_times_that_run_backwards_or_are_missing(tmp_path):
    place = timed(tmp_path)
    said = records(place)
    cohorts(said)[3]["time"] = 0.1
    rewrite(place, said)
    assert "backwards" in failed(place.audit())["journal"]
    cohorts(said)[3]["time"] = None
    rewrite(place, said)
    assert {"cohorts", "timers"} & set(failed(place.audit()))


def test_a_budget_that_was_passed(tmp_path):
    mu = PLAN.guarantee.mu
    place = made(tmp_path, 8, budget=math.nextafter(PLAN.guarantee.epsilon, math.inf))
    assert failed(place.audit()) == {}
    assert place.audit().epsilon == pytest.approx(epsilon_of(1e-6, mu), rel=1e-7)
    spent = place.audit().epsilon
    other = made(tmp_path / "other", 0, budget=spent * 0.9)
    with other.open() as server:
        while server.ended() is None:
            play(server)
        assert server.rounds < 8
    assert failed(other.audit()) == {}
    forged = made(tmp_path / "forged", 4, budget=spent * 0.9)
    said = records(forged)
    commits(said)[-1]["epsilon"] = spent
    rewrite(forged, said)
    assert "budget" in failed(forged.audit())


def test_a_journal_of_many_lines_is_read_once(place):
    key = (place.folder / "private" / "noise.key").read_bytes()
    journal = read_journal(place.journal, key)
    assert isinstance(journal, Journal)
    assert [attempt.cohort.clients for attempt in journal.attempts] == [""] * 7
