"""A folder that was rolled back, edited, cut or mixed up: refused, unchanged, and not lost."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_run import BY_TIME, NAMES, Place, fast_places, go_on, result, take_reports

from dpftrl import MinSep, account, mechanism
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated import Server
from dpftrl.plan import Fleet, Plan
from dpftrl.verify import verify_run
from dpftrl.verify.verdict import Verdict

Content = dict[str, bytes]

JOURNAL, KEY, SNAPSHOT = "private/journal.jsonl", "private/noise.key", "private/snapshot.bin"
NOISE, GUARANTEE, LOG = "private/noise.safetensors", "guarantee.json", "private/log.jsonl"
CHECKPOINT = "private/checkpoints/00000003.safetensors"
NEEDED = (JOURNAL, KEY, CHECKPOINT, "run.json", "plan.json")
CACHES = (NOISE, GUARANTEE, LOG, SNAPSHOT)
AT = 3  # rounds of the run that is harmed


def files(folder: Path) -> Content:
    """Everything in a folder but the number of the process that holds it."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if path.name != "lock"}


def put(folder: Path, content: Content) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class History:
    """A run, with what its folder and its witness were after each of its rounds."""

    def __init__(self, place: Place, key: int = 1, salt: int = 0):
        self.place = place
        self.after: list[Content] = []
        self.witnessed: list[Content] = []
        with place.create(key=key) as server:
            self._remember()
            while server.rounds < AT + 2:
                go_on(server, salt, server.rounds + 1)
                self._remember()
        self.back_to(AT)
        with place.open() as server:
            go_on(server, salt)
        self.end = result(place)

    def _remember(self) -> None:
        self.after.append(files(self.place.folder))
        self.witnessed.append(files(self.place.state))

    def back_to(self, rounds: int) -> Content:
        """The run as it was, its witness too: nobody could tell."""
        put(self.place.folder, self.after[rounds])
        put(self.place.state, self.witnessed[rounds])
        return dict(self.after[rounds])

    @property
    def witness(self) -> Path:
        (path,) = self.place.state.glob("*.json")
        return path


@pytest.fixture(scope="module")
def history() -> Iterator[History]:
    with fast_places() as places:
        yield History(next(places))


@pytest.fixture(scope="module")
def others() -> Iterator[list[History]]:
    """Runs with the same settings: one with another key, one with the same and other updates."""
    with fast_places() as places:
        yield [History(next(places), key=2), History(next(places), key=1, salt=1)]


def refused(place: Place, trust_folder: bool = False) -> str:
    """The reason for which a run does not open; its folder must stay as it is."""
    before, witness = files(place.folder), files(place.state)
    with pytest.raises(InvalidInput) as error:
        place.open(trust_folder).close()
    assert files(place.folder) == before
    assert {name: witness[name] for name in witness if name.endswith(".json")} == {
        name: data for name, data in files(place.state).items() if name.endswith(".json")
    }
    reason = str(error.value)
    assert "\n" not in reason
    assert len(reason) > 20
    return reason


def buffers(server: Server) -> dict[str, bytes]:
    held = server._store.noise._state  # pyright: ignore[reportPrivateUsage]
    return {name: tensor.tobytes() for name, tensor in held.tensors().items()}


def goes_on(history: History) -> None:
    """Undo the damage, and the run is what it was."""
    history.back_to(AT)
    with history.place.open() as server:
        go_on(server)
    assert result(history.place) == history.end


@pytest.mark.parametrize("rounds", range(AT))
def test_a_restored_backup_is_refused(history: History, rounds: int) -> None:
    history.back_to(rounds + 2)
    put(history.place.folder, history.after[rounds])
    assert "rolled back" in refused(history.place)
    put(history.place.folder, history.after[rounds + 2])
    with history.place.open() as server:
        go_on(server)
    assert result(history.place) == history.end


@pytest.mark.parametrize("rounds", range(AT))
@pytest.mark.parametrize("name", [JOURNAL, CHECKPOINT])
def test_one_file_of_a_backup_is_refused(history: History, name: str, rounds: int) -> None:
    content = history.back_to(AT)
    old = name.replace(f"{AT:08d}", f"{rounds:08d}")
    content[name] = next(after[old] for after in history.after[rounds:] if old in after)
    put(history.place.folder, content)
    refused(history.place)


@pytest.mark.parametrize("name", [NOISE, GUARANTEE, SNAPSHOT])
def test_a_cache_of_a_backup_does_no_harm(history: History, name: str) -> None:
    for rounds in range(AT):
        content = history.back_to(AT)
        content[name] = history.after[rounds].get(name, b"")
        put(history.place.folder, content)
        with history.place.open() as server:
            go_on(server)
        assert result(history.place) == history.end


def test_a_trusted_folder_behind_its_noise_is_refused(history: History) -> None:
    content = history.back_to(1)
    put(history.place.folder, {**content, NOISE: history.after[2][NOISE]})
    history.witness.unlink()
    assert "rolled back" in refused(history.place, trust_folder=True)


def test_a_trusted_folder_behind_its_snapshot_is_refused(history: History) -> None:
    content = history.back_to(1)
    assert SNAPSHOT not in content
    put(history.place.folder, {**content, SNAPSHOT: history.after[2][SNAPSHOT]})
    history.witness.unlink()
    assert "rolled back: its snapshot" in refused(history.place, trust_folder=True)


def test_the_snapshot_of_a_copy_that_went_another_way_is_refused(tmp_path: Path) -> None:
    """It belongs to this run, and to no line of its journal."""
    place = Place(tmp_path / "run", tmp_path / "state")
    with place.create() as server:
        go_on(server, rounds=1)
    other = Place(tmp_path / "copy", tmp_path / "state of copy")
    shutil.copytree(place.folder, other.folder)
    shutil.copytree(place.state, other.state)
    for one, salt in ((place, 0), (other, 1)):
        with one.open() as server:
            go_on(server, salt, rounds=4)
    shutil.copy(other.folder / SNAPSHOT, place.folder / SNAPSHOT)
    assert "rolled back: its snapshot" in refused(place)
    (place.folder / SNAPSHOT).unlink()
    place.open().close()


def test_a_trusted_folder_behind_its_other_files_is_refused(history: History) -> None:
    """The journal went back: checkpoints show that more was released."""
    content = history.back_to(AT)
    older = {JOURNAL: history.after[1][JOURNAL]}
    checkpoint = "private/checkpoints/00000001.safetensors"
    older[checkpoint] = history.after[1][checkpoint]
    del content[NOISE], content[SNAPSHOT]
    put(history.place.folder, {**content, **older})
    history.witness.unlink()
    refused(history.place, trust_folder=True)


def test_without_its_witness_a_run_goes_on_only_if_trusted(history: History) -> None:
    history.back_to(AT)
    history.witness.unlink()
    assert "witness" in refused(history.place)
    history.place.open(trust_folder=True).close()
    with history.place.open() as server:
        go_on(server)
    assert result(history.place) == history.end


def check_harmed(history: History, name: str, data: bytes) -> None:
    """What is needed is refused; a cache may be anything."""
    content = history.back_to(AT)
    put(history.place.folder, {**content, name: data})
    if name in NEEDED:
        refused(history.place)
        return
    with history.place.open() as server:
        found = buffers(server)
    history.back_to(AT)
    with history.place.open() as server:
        assert found == buffers(server)
    assert (history.place.folder / GUARANTEE).read_bytes() == content[GUARANTEE]


def flips(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    dice = random.Random(seed)
    for at in sorted(dice.sample(range(len(data)), min(count, len(data)))):
        flipped = bytearray(data)
        flipped[at] ^= 1 << dice.randrange(8) if dice.random() < 0.7 else dice.randrange(1, 256)
        yield bytes(flipped)


@pytest.mark.parametrize("name", [*NEEDED, NOISE, GUARANTEE, SNAPSHOT])
def test_a_flipped_bit_is_noticed(history: History, name: str) -> None:
    for data in flips(history.after[AT][name], 24, seed=0):
        check_harmed(history, name, data)
    goes_on(history)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NEEDED, NOISE, GUARANTEE, SNAPSHOT])
def test_any_flipped_byte_is_noticed(history: History, name: str) -> None:
    for data in flips(history.after[AT][name], 10**6, seed=1):
        check_harmed(history, name, data)
    goes_on(history)


def test_a_flipped_bit_of_the_witness_is_noticed(history: History) -> None:
    history.back_to(AT)
    data = history.witness.read_bytes()
    for flipped in flips(data, len(data), seed=2):
        history.witness.write_bytes(flipped)
        refused(history.place)
    history.witness.write_bytes(data)
    goes_on(history)


@pytest.mark.parametrize("name", [*NEEDED, *CACHES])
def test_a_file_that_was_cut_is_noticed(history: History, name: str) -> None:
    data = history.after[AT][name]
    for length in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1}:
        check_harmed(history, name, data[:length])
        check_harmed(history, name, data[:length] + bytes(len(data) - length))
    goes_on(history)


NONSENSE = (
    b"\0" * 100,
    b"[" * 100_000,
    b'{"mac":"","record":' + b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe\n\xff",
    b'{"mac":"\\ud800","record":{}}\n',
    b'{"mac":"","record":1e999}\n' * 3,
    b"\xff" * 8 + b"{}",
    (2).to_bytes(8, "little") + b"{}",
    (40).to_bytes(8, "little") + b'{"__metadata__":{"header":"' + b"{" * 13,
    b"round,client,status\n0,c,counted\n",
    b"\r\n\r\n",
)


@pytest.mark.parametrize("name", [*NEEDED, *CACHES])
@pytest.mark.parametrize("data", NONSENSE)
def test_nonsense_is_noticed(history: History, name: str, data: bytes) -> None:
    check_harmed(history, name, data)


@pytest.mark.parametrize("data", [*NONSENSE, b"", b"{}", b"null"])
def test_nonsense_of_a_witness_is_noticed(history: History, data: bytes) -> None:
    history.back_to(AT)
    history.witness.write_bytes(data)
    refused(history.place)
    refused(history.place, trust_folder=True)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_file_is_noticed(history: History, name: str) -> None:
    content = history.back_to(AT)
    del content[name]
    put(history.place.folder, content)
    refused(history.place)
    refused(history.place, trust_folder=True)
    goes_on(history)


@pytest.mark.parametrize("name", [*NEEDED, GUARANTEE])
def test_a_folder_in_place_of_a_file_is_refused(history: History, name: str) -> None:
    history.back_to(AT)
    (history.place.folder / name).unlink()
    (history.place.folder / name).mkdir()
    refused(history.place)
    goes_on(history)


@pytest.mark.parametrize("name", [NOISE, LOG, SNAPSHOT])
def test_a_folder_in_place_of_a_cache_does_no_harm(history: History, name: str) -> None:
    history.back_to(AT)
    (history.place.folder / name).unlink(missing_ok=True)
    (history.place.folder / name).mkdir()
    with history.place.open() as server:
        go_on(server)
    assert result(history.place) == history.end


@pytest.mark.parametrize("name", [".notes.1", ".cache.d.20"])
def test_what_somebody_keeps_in_the_folder_does_no_harm(history: History, name: str) -> None:
    history.back_to(AT)
    (history.place.folder / name).mkdir()
    (history.place.folder / "private" / "checkpoints" / f"{name}.safetensors").mkdir()
    with history.place.open() as server:
        go_on(server)
    assert result(history.place) == history.end


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("name", [*NEEDED, *CACHES])
def test_a_file_of_another_run_is_noticed(
    history: History, others: list[History], name: str, other: int
) -> None:
    foreign = others[other].after[AT][name]
    if foreign != history.after[AT][name]:
        check_harmed(history, name, foreign)
        goes_on(history)


@pytest.mark.parametrize("kept", ["run.json", KEY, JOURNAL])
@pytest.mark.parametrize("other", [0, 1])
def test_all_files_of_another_run_but_one_are_noticed(
    history: History, others: list[History], kept: str, other: int
) -> None:
    content = history.back_to(AT)
    foreign = others[other].after[AT]
    if foreign[kept] != content[kept]:
        put(history.place.folder, {**foreign, kept: content[kept]})
        refused(history.place)
        put(history.place.state, others[other].witnessed[AT])
        refused(history.place)
        refused(history.place, trust_folder=True)


def test_the_witness_of_another_run_is_noticed(history: History, others: list[History]) -> None:
    history.back_to(AT)
    for other in others:
        other.back_to(AT)
        history.witness.write_bytes(other.witness.read_bytes())
        refused(history.place)
        refused(history.place, trust_folder=True)
    goes_on(history)


def test_another_plan_is_noticed(history: History, tmp_path: Path) -> None:
    fleet = Fleet(population=60, report_goal=4, over_selection=1.25)
    quieter = account(mechanism("blt-b400"), MinSep(6, 3), noise_multiplier=0.5, delta=1e-6)
    other = Place(tmp_path / "other", tmp_path / "state")
    other.create(plan=Plan(fleet, quieter)).close()
    check_harmed(history, "plan.json", (other.folder / "plan.json").read_bytes())
    goes_on(history)


def test_an_identity_cannot_lead_out_of_the_state_folder(history: History) -> None:
    content = history.back_to(AT)
    victim = history.place.state.parent / "victim.lock"
    victim.write_text("precious")
    run = json.loads(content["run.json"])["run"].encode()
    for name in (b"../victim", b"a\\u0000b", b"x" * 300):
        put(history.place.folder, {**content, "run.json": content["run.json"].replace(run, name)})
        refused(history.place)
    assert victim.read_text() == "precious"


def test_a_lost_journal_is_not_written_over(history: History) -> None:
    content = history.back_to(AT)
    del content[JOURNAL]
    put(history.place.folder, content)
    with pytest.raises(UnsafeState, match="journal"):
        history.place.create()
    assert files(history.place.folder) == content
    goes_on(history)


def last_line(data: bytes) -> int:
    """Where it begins."""
    return data.rstrip(b"\n").rfind(b"\n") + 1


@pytest.fixture(scope="module", params=["cohort", "committed", "abandoned"])
def torn(request: pytest.FixtureRequest) -> Iterator[tuple[Place, Content, Content, Content]]:
    """A run whose last line is of some kind; the witness before it was written, and after."""
    with fast_places() as places:
        place = next(places)
        with place.create() as server:
            go_on(server, rounds=2)
            attempt = server.begin(NAMES)
            before = files(place.state)
            if request.param == "cohort":
                before = _one_behind(place, before)
            take_reports(attempt)
            if request.param == "committed":
                server.commit(attempt)
            if request.param == "abandoned":
                server.abandon(attempt, "too few")
        content = files(place.folder)
        assert json.loads(content[JOURNAL].splitlines()[-1])["record"]["kind"] == request.param
        yield place, content, before, files(place.state)


def _one_behind(place: Place, state: Content) -> Content:
    """The witness before the last line."""
    line = json.loads((place.folder / JOURNAL).read_bytes().splitlines()[-2])
    (name,) = (name for name in state if name.endswith(".json"))
    said = json.loads(state[name])
    return {name: json.dumps({**said, "lines": said["lines"] - 1, "mac": line["mac"]}).encode()}


def tails(journal: bytes, step: int) -> Iterator[bytes]:
    """The journal with its last line cut, or zeros in place of the rest."""
    for cut in range(last_line(journal), len(journal), step):
        yield journal[:cut]
        yield journal[:cut] + bytes(len(journal) - cut)


def test_a_torn_line_is_left_out(torn: tuple[Place, Content, Content, Content]) -> None:
    place, content, before, _ = torn
    for journal in tails(content[JOURNAL], 9):
        put(place.folder, {**content, JOURNAL: journal})
        put(place.state, before)
        with place.open() as server:
            assert server.rounds == 2
            assert server.model.tobytes()


def test_a_torn_line_that_the_witness_has_seen_is_noticed(
    torn: tuple[Place, Content, Content, Content],
) -> None:
    place, content, _, after = torn
    for journal in tails(content[JOURNAL], 9):
        put(place.folder, {**content, JOURNAL: journal})
        put(place.state, after)
        assert "rolled back" in refused(place)


def test_a_run_with_a_torn_line_ends_as_ever(
    torn: tuple[Place, Content, Content, Content], history: History
) -> None:
    place, content, before, _ = torn
    for journal in tails(content[JOURNAL], 80):
        put(place.folder, {**content, JOURNAL: journal})
        put(place.state, before)
        with place.open() as server:
            go_on(server)
        assert result(place) == history.end


def test_a_round_in_flight_counts_for_timers_by_time(tmp_path: Path) -> None:
    place = Place(tmp_path / "run", tmp_path / "state")
    names = NAMES[:5]
    with place.create(BY_TIME) as server:
        attempt = server.begin(names, now=0.0)
        take_reports(attempt)
        server.commit(attempt)
        server.begin(names, now=20.0)
        assert server.guarantee().epsilon >= server.epsilon
    with place.open() as server:
        assert server.guarantee().epsilon >= server.epsilon
        assert set(server.begin(names).clients) == set(names)


def test_a_backup_that_is_restored_under_a_server_stops_it(history: History) -> None:
    """It must not write at the place where it left off, beyond the end of what is there now."""
    history.back_to(AT)
    with history.place.open() as server:
        (history.place.folder / JOURNAL).write_bytes(history.after[1][JOURNAL])
        with pytest.raises(InvalidInput, match="somebody else has changed it"):
            go_on(server)
    goes_on(history)


def test_without_locks_two_servers_do_not_both_release(history: History) -> None:
    """Somebody took the locks for stale, and removed them while their server was at work."""
    history.back_to(AT)
    with history.place.open() as one:
        for lock in (*history.place.folder.rglob("lock"), *history.place.state.glob("*.lock")):
            lock.unlink()
        with history.place.open() as other:
            go_on(other, salt=1, rounds=AT + 1)
            with pytest.raises(UnsafeState):
                go_on(one, salt=2, rounds=AT + 1)
            go_on(other, salt=1)
    history.place.open().close()


@pytest.mark.parametrize("behind", [2, 3, 7])
def test_a_witness_that_is_far_behind_is_refused_as_verify_refuses_it(
    tmp_path: Path, behind: int
) -> None:
    """A killed server leaves a witness that is one line behind, never more."""
    place = Place(tmp_path / "run", tmp_path / "state")
    with place.create() as server:
        witness = tmp_path / "state" / f"{server.run_id}.json"
        seen = list[bytes]()
        while server.rounds < 5:
            attempt = server.begin(NAMES)
            seen.append(witness.read_bytes())
            take_reports(attempt)
            server.commit(attempt)
            seen.append(witness.read_bytes())
    witness.write_bytes(seen[-1 - behind])
    with pytest.raises(UnsafeState, match="witness is an old copy") as error:
        place.open()
    assert "--trust-folder" in str(error.value)
    outcomes = {check.name: check.outcome for check in place_verdict(tmp_path).checks}
    assert outcomes["witness"] == "failed"
    assert witness.read_bytes() == seen[-1 - behind]
    Server.resume(tmp_path / "run", state_folder=tmp_path / "state", trust_folder=True).close()
    assert witness.read_bytes() == seen[-1]


def test_a_witness_that_is_one_line_behind_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path / "run", tmp_path / "state")
    with place.create() as server:
        witness = tmp_path / "state" / f"{server.run_id}.json"
        go_on(server, rounds=2)
        attempt = server.begin(NAMES)
        before = witness.read_bytes()
        take_reports(attempt)
        server.commit(attempt)
    witness.write_bytes(before)
    assert all(check.outcome != "failed" for check in place_verdict(tmp_path).checks)
    with place.open() as server:
        assert server.rounds == 3


@pytest.mark.parametrize("edit", [{"mac": "0" * 64}, {"lines": 3}, {"lines": -1}], ids=str)
def test_an_edited_witness_is_refused_even_if_the_folder_is_trusted(tmp_path: Path, edit) -> None:
    place = Place(tmp_path / "run", tmp_path / "state")
    with place.create() as server:
        witness = tmp_path / "state" / f"{server.run_id}.json"
        go_on(server, rounds=4)
    witness.write_text(json.dumps({**json.loads(witness.read_text()), **edit}))
    for trust in (False, True):
        with pytest.raises(UnsafeState, match="rolled back or changed"):
            Server.resume(tmp_path / "run", state_folder=tmp_path / "state", trust_folder=trust)
    outcomes = {check.name: check.outcome for check in place_verdict(tmp_path).checks}
    assert outcomes["witness"] == "failed"


def place_verdict(root: Path) -> Verdict:
    return verify_run(root / "run", root / "state")
