"""No local variable of a server shows a secret, whatever line an error or Ctrl-C comes at.

Whoever prints a traceback with local variables, as many error reporters do, prints these.
"""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from small_runs import PEOPLE, SIZE, create, one_round, records, reopen, small_plan

import dpftrl
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated import Aggregator, PartialSum
from dpftrl.noise import key as key_module
from dpftrl.verify import verify_run

SOURCE = str(Path(dpftrl.__file__).parent)


def update_of(client: str, row: int) -> np.ndarray:
    generator = np.random.default_rng([int(client.split()[1]), row])
    return generator.normal(size=SIZE).astype(np.float32) / 4


def texts_of(secret: bytes) -> set[str]:
    return {secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1]}


class Watch:
    """Looks at all local variables of our functions, before every line and at every return."""

    def __init__(self, *sources: str) -> None:
        self._sources = sources
        self.shown: dict[str, set[str]] = {}
        self.frames = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._sources):
            return None
        if event != "call":
            self._look(frame)
        return self

    def _look(self, frame: FrameType) -> None:
        self.frames += 1
        for name, value in list(frame.f_locals.items()):
            place = f"{frame.f_code.co_filename}: {frame.f_code.co_name}: {name}"
            try:
                self.shown.setdefault(place, set()).add(repr(value))
            except AttributeError:  # an object that is not finished yet
                continue

    def places_with(self, secrets: set[str]) -> set[str]:
        return {
            place
            for place, texts in self.shown.items()
            if any(secret in text for text in texts for secret in secrets)
        }


def watched(act: Callable[[], object], *sources: str) -> Watch:
    watch = Watch(SOURCE, *sources)
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        act()
    finally:
        sys.settrace(before)
    assert watch.frames > 100
    return watch


def digests_of(server: dpftrl.Server) -> set[str]:
    committed = [record for record in records(server) if record["kind"] == "committed"]
    return set().union(*(texts_of(bytes.fromhex(record["digest"])) for record in committed))


@pytest.mark.parametrize("name", ["blt-b400", "tree"])
def test_no_local_variable_of_a_round_or_of_resuming_shows_a_secret(tmp_path, name):
    with create(tmp_path, small_plan(name=name), snapshot_every=100) as server:
        one_round(server, PEOPLE, update_of)
        sums = list[np.ndarray]()
        honest = server._store.noise.add_to

        def add_to(total: Any) -> None:
            sums.append(total.steps.copy())
            honest(total)

        server._store.noise.add_to = add_to
        watch = watched(lambda: one_round(server, PEOPLE, update_of))
        digests, key = digests_of(server), texts_of(server.folder.key.read_bytes())
        (total,) = sums
        assert np.abs(total).min() > 10_000
        steps = {str(step) for step in total.tolist()}
        assert watch.places_with(digests) == set()
        assert watch.places_with(steps) == set()
        assert watch.places_with(key) == set()
        again = watched(lambda: reopen(server).close())
        assert any("replay" in place for place in again.shown)
        assert again.places_with(digests) == set()
        assert again.places_with(key) == set()


def test_no_local_variable_text_or_file_shows_a_partial_sum(tmp_path):
    with create(tmp_path, aggregators=True) as server:
        one_round(server, PEOPLE, update_of)
        values = list[int]()

        def round_with_an_aggregator() -> None:
            current = server.begin(PEOPLE)
            aggregator = Aggregator.of(current.share(current.clients).encoded())
            for client in current.clients:
                aggregator.report(client, update_of(client, current.number), current.attempt)
            data = aggregator.partial_sum().encoded()
            partial = PartialSum.decoded(data)
            values.extend(np.frombuffer(partial.steps, "<i8").tolist())
            with pytest.raises(ReportRefused) as refused:
                current.report_partial(msgspec.structs.replace(partial, clients=()))
            texts.append(str(refused.value))
            with pytest.raises(InvalidInput) as unreadable:
                PartialSum.decoded(data[:-1])
            texts.append(str(unreadable.value))
            current.report_partial(partial)
            texts.extend([repr(partial), str(partial), f"{aggregator!r}"])
            with pytest.raises(TypeError):
                pickle.dumps(partial)
            server.commit(current)

        texts = list[str]()
        watch = watched(round_with_an_aggregator)
        assert any("report_partial" in place for place in watch.shown)
        assert np.abs(values).min() > 10_000
        raw = np.array(values, "<i8").tobytes()
        secrets = {str(value) for value in values} | {repr(raw)[2:-1], raw.hex()}
        secrets |= {repr(raw[i : i + 8])[2:-1] for i in range(0, len(raw), 8)}
        assert watch.places_with(secrets) == set()
        assert not any(secret in text for secret in secrets for text in texts)
        assert not any(str(value).encode() in server.folder.log.read_bytes() for value in values)


def test_no_local_variable_of_a_verification_shows_a_secret(tmp_path):
    with create(tmp_path) as server:
        for _ in range(3):
            one_round(server, PEOPLE, update_of)
        digests, key = digests_of(server), texts_of(server.folder.key.read_bytes())
    watch = watched(lambda: verify_run(tmp_path / "run", tmp_path / "state"))
    assert any("read_journal" in place for place in watch.shown)
    assert watch.places_with(digests) == set()
    assert watch.places_with(key) == set()


def test_what_is_shown_is_noticed(tmp_path, monkeypatch):
    """The control: a digest that is kept as bytes."""
    with create(tmp_path) as server:
        one_round(server, PEOPLE, update_of)

        def careless(key, row, digest):
            shown = digest.secret_bytes()
            return key_module.row_key(key, row, key_module.Secret(memoryview(shown)))

        monkeypatch.setattr("dpftrl.noise.stream.row_key", careless)
        watch = watched(lambda: one_round(server, PEOPLE, update_of), careless.__code__.co_filename)
        (place,) = watch.places_with(digests_of(server))
        assert place.endswith("careless: shown")


def test_the_state_of_a_run_cannot_be_pickled(tmp_path):
    with create(tmp_path) as server:
        one_round(server, PEOPLE, update_of)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(server._store.state)
