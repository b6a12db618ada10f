"""Files forged with the noise key: all digests fit, but the content must still be consistent."""

import math

import pytest
from journal_codes import clients_of, set_clients
from recorded_runs import (
    PLAN,
    RunFolders,
    failed,
    forge,
    keep_a_ledger,
    read_records,
    record_run,
    rewrite,
    run_attempt,
)

from dpftrl.errors import UnsafeState
from dpftrl.verify.epsilon import epsilon_of
from dpftrl.verify.journal import Journal, read_journal


@pytest.fixture(scope="module", params=["journal alone", "journal and ledger"])
def original(tmp_path_factory, request) -> RunFolders:
    run = record_run(tmp_path_factory.mktemp("original"), 5, budget=1000.0)
    with run.open() as server:
        run_attempt(server, abandon=True)
        run_attempt(server)
    return run if request.param == "journal alone" else keep_a_ledger(run)


@pytest.fixture
def run(original, tmp_path) -> RunFolders:
    return original.copy_to(tmp_path)


@pytest.fixture
def with_ledger(run) -> RunFolders:
    if not run.ledger.exists():
        keep_a_ledger(run)
    return run


def cohorts(records: list[dict]) -> list[dict]:
    return [record for record in records if record["kind"] == "cohort"]


def commits(records: list[dict]) -> list[dict]:
    return [record for record in records if record["kind"] == "committed"]


def test_rewritten_but_unchanged_files_pass(run):
    """The negative control of all tests below."""
    rewrite(run, read_records(run))
    assert failed(run.verify()) == {}


def test_a_client_contacted_too_early_fails(run):
    records = read_records(run)
    first, second = cohorts(records)[1], cohorts(records)[3]
    early = clients_of(first)[0]
    others = clients_of(second)[1:]
    set_clients(second, sorted([early, *others]))
    rewrite(run, records)
    verdict = failed(run.verify())
    assert "rows 1 and 3" in verdict["timers"]
    assert set(verdict) <= {"timers", "cap", "what happened"}  # every digest fits


def test_a_client_contacted_too_early_for_an_abandoned_attempt_fails(run):
    records = read_records(run)
    abandoned = next(record for record in records if record["kind"] == "abandoned")
    target = cohorts(records)[abandoned["attempt"]]
    before = cohorts(records)[abandoned["attempt"] - 1]
    moved = [clients_of(before)[0], *clients_of(target)[1:]]
    set_clients(target, sorted(moved))
    rewrite(run, records)
    assert "timers" in failed(run.verify())


def test_a_client_counted_in_every_round_fails(run):
    records = read_records(run)
    for cohort in cohorts(records):
        set_clients(cohort, ["0" * 16, *clients_of(cohort)[1:]])
    rewrite(run, records)
    assert {"timers", "cap", "what happened"} <= set(failed(run.verify()))


def test_a_client_twice_in_a_cohort_fails(run):
    records = read_records(run)
    clients = clients_of(cohorts(records)[2])
    set_clients(cohorts(records)[2], [clients[0], clients[0], *clients[2:]])
    rewrite(run, records)
    assert "rising order" in failed(run.verify())["journal"]


def test_too_many_clients_or_reports_fail(run):
    records = read_records(run)
    target = cohorts(records)[2]
    set_clients(target, [*clients_of(target), "f" * 16])
    rewrite(run, records)
    assert "cohorts" in failed(run.verify())
    records = read_records(run)
    target = cohorts(records)[2]
    set_clients(target, clients_of(target)[:-1])
    commits(records)[2]["reports"] = 4
    rewrite(run, records)
    assert "report goal" in failed(run.verify())["cohorts"]


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
def test_a_ledger_that_contradicts_the_journal_fails(with_ledger, statuses):
    run = with_ledger
    rewrite(run, read_records(run), {2: statuses})
    assert "attempt 2" in failed(run.verify())["ledger"]


def test_a_counted_client_in_an_abandoned_attempt_fails(with_ledger):
    run = with_ledger
    records = read_records(run)
    attempt = next(record for record in records if record["kind"] == "abandoned")["attempt"]
    rewrite(run, records, {attempt: ["counted"] + ["abandoned"] * 3})
    assert "abandoned" in failed(run.verify())["ledger"]


@pytest.fixture
def without_ledger(tmp_path) -> RunFolders:
    return record_run(tmp_path / "alone", 3)


@pytest.mark.parametrize("bits", ["", "4A==", "8A==", "8f==", "wA==", "!!!!", "8AA="])
def test_counted_clients_that_contradict_the_journal_fail(without_ledger, bits):
    """Three of four clients are counted: 1110 or another order, and four bits of padding."""
    run = without_ledger
    records = read_records(run)
    commits(records)[1]["counted"] = bits
    forge(run, records)
    outcome = failed(run.verify())
    assert (outcome == {}) == (bits == "4A==")
    assert bits == "4A==" or "line 5" in outcome["journal"]


def code_of_others(record: dict) -> None:
    record["size"] += 1


def not_base64(record: dict) -> None:
    record["clients"] = "*" + record["clients"][1:]


def shortened(record: dict) -> None:
    record["clients"] = record["clients"][:-4]


def lengthened(record: dict) -> None:
    record["clients"] = "AAAA" + record["clients"]


def hexadecimal(record: dict) -> None:
    record["clients"] = "".join(clients_of(record))


def of_version_1(record: dict) -> None:
    hexadecimal(record)
    del record["size"]


@pytest.mark.parametrize(
    "edit", [code_of_others, not_base64, shortened, lengthened, hexadecimal, of_version_1]
)
def test_a_cohort_that_cannot_be_decoded_fails(without_ledger, edit):
    run = without_ledger
    records = read_records(run)
    edit(cohorts(records)[1])
    forge(run, records)
    assert "line 4" in failed(run.verify())["journal"]
    with pytest.raises(UnsafeState):
        run.open()


def test_ledger_fields_in_a_journal_without_a_ledger_fail(without_ledger):
    run = without_ledger
    records = read_records(run)
    commits(records)[1].update(ledger_bytes=100, ledger_sha256="0" * 64)
    forge(run, records)
    assert "version 2" in failed(run.verify())["journal"]
    with pytest.raises(UnsafeState):
        run.open()


def test_a_wrong_epsilon_in_the_journal_fails(run):
    for factor in (0.9, 1 - 1e-6, 1 + 1e-5, 2.0):
        records = read_records(run)
        commits(records)[-1]["epsilon"] *= factor
        rewrite(run, records)
        assert "journalled epsilon" in failed(run.verify())
        commits(records)[-1]["epsilon"] /= factor
        rewrite(run, records)
    assert failed(run.verify()) == {}


def test_a_decreasing_epsilon_in_the_journal_fails(run):
    records = read_records(run)
    commits(records)[1]["epsilon"] *= 5
    rewrite(run, records)
    assert "epsilon falls at row 2" in failed(run.verify())["journalled epsilon"]


def swapped(records: list[dict]) -> None:
    records[1], records[3] = records[3], records[1]


def skipped_row(records: list[dict]) -> None:
    records[3]["row"] = records[4]["row"] = 2


def no_cohort(records: list[dict]) -> None:
    del records[3]


def no_end(records: list[dict]) -> None:
    del records[4]


def twice_created(records: list[dict]) -> None:
    records.append(records[0])


def never_created(records: list[dict]) -> None:
    del records[0]


def other_attempt(records: list[dict]) -> None:
    records[4]["attempt"] = 7


def unknown_field(records: list[dict]) -> None:
    records[1]["more"] = 1


def negative(records: list[dict]) -> None:
    records[2]["reports"] = -3


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
def test_records_in_an_impossible_order_fail(run, edit):
    records = read_records(run)
    edit(records)
    rewrite(run, records)
    assert "line" in failed(run.verify())["journal"]


def timed(root) -> RunFolders:
    run = record_run(root, 0, timer_hours=2.0)
    with run.open() as server:
        for number in range(6):
            run_attempt(server, now=0.7 * number)
    assert failed(run.verify()) == {}
    return run


def test_a_client_contacted_too_early_by_a_timer_in_hours_fails(tmp_path):
    run = timed(tmp_path)
    records = read_records(run)
    for cohort in cohorts(records):
        cohort["time"] *= 0.5
    rewrite(run, records)
    assert "the timer is 2 hours" in failed(run.verify())["timers"]


def test_decreasing_or_missing_times_fail(tmp_path):
    run = timed(tmp_path)
    records = read_records(run)
    cohorts(records)[3]["time"] = 0.1
    rewrite(run, records)
    assert "backwards" in failed(run.verify())["journal"]
    cohorts(records)[3]["time"] = None
    rewrite(run, records)
    assert {"cohorts", "timers"} & set(failed(run.verify()))


def test_an_exceeded_budget_fails(tmp_path):
    mu = PLAN.guarantee.mu
    run = record_run(tmp_path, 8, budget=math.nextafter(PLAN.guarantee.epsilon, math.inf))
    assert failed(run.verify()) == {}
    assert run.verify().epsilon == pytest.approx(epsilon_of(1e-6, mu), rel=1e-7)
    spent = run.verify().epsilon
    other = record_run(tmp_path / "other", 0, budget=spent * 0.9)
    with other.open() as server:
        while server.ended() is None:
            run_attempt(server)
        assert server.rounds < 8
    assert failed(other.verify()) == {}
    forged = record_run(tmp_path / "forged", 4, budget=spent * 0.9)
    records = read_records(forged)
    commits(records)[-1]["epsilon"] = spent
    rewrite(forged, records)
    assert "budget" in failed(forged.verify())


def test_the_journal_keeps_clients_as_numbers_only(run):
    key = (run.folder / "private" / "noise.key").read_bytes()
    journal = read_journal(run.journal, key)
    assert isinstance(journal, Journal)
    assert [attempt.cohort.clients for attempt in journal.attempts] == [""] * 7
