"""Adaptive clipping on the server: clip norms of committed rounds, recomputed by a plain loop."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_runs import PEOPLE, SIZE, create, fill, log, one_round, records, reopen, small_plan

from dpftrl import AdaptiveClipping
from dpftrl.errors import InvalidInput
from dpftrl.federated import Server, Settings
from dpftrl.verify import verify_run

GOAL = 10
PLAN = small_plan(goal=GOAL, noise_multiplier=1.5)


def random_update(client: str, row: int) -> np.ndarray:
    random = np.random.default_rng([PEOPLE.index(client), row])
    return random.standard_normal(SIZE) * math.exp(random.normal(0, 1))


def committed(server: Server) -> list[dict]:
    return [record for record in records(server) if record["kind"] == "committed"]


def loop(rounds: list[dict], options: dict, goal: int, step: float) -> list[float]:
    """The clip norms that the noisy bits of these rounds give, in plain Python."""
    norm, settled, norms = options["start"], 0, []
    for one in rounds:
        norms.append(norm)
        noisy_mean_of_signs = one["clipping"]["bits"] * step / options["beta"] / goal
        excess = (noisy_mean_of_signs + 1) / 2 - options["quantile"]
        up, down = norm > options["start"], norm < options["start"]
        settled = settled + 1 if settled or (up and excess > 0) or (down and excess < 0) else 0
        norm *= math.exp(-options["learning_rate"] * excess / math.sqrt(settled + 1))
        if not options["minimum"] <= norm <= options["maximum"]:
            norm = min(max(norm, options["minimum"]), options["maximum"])
            settled = max(settled, 1)
    return [*norms, norm]


def test_clip_norms_follow_from_the_noisy_bits_in_the_journal(tmp_path):
    server = create(tmp_path, PLAN, clip_norm="adaptive")
    for _ in range(6):
        one_round(server, update=random_update)
    server = reopen(server)
    for _ in range(6):
        one_round(server, update=random_update)
    options = json.loads(server.folder.settings.read_text())["settings"]["clip_norm"]
    assert options["beta"] == 0.1
    wanted = loop(committed(server), options, GOAL, server._grid.step)
    found = [one["clipping"]["state"]["clip_norm"] for one in committed(server)]
    assert [*found, server.clip_norm] == pytest.approx(wanted, rel=1e-12)
    assert len(set(found)) == len(found)
    # Negative controls: other divisors give other norms.
    assert loop(committed(server), options, GOAL - 1, server._grid.step)[5] != pytest.approx(
        wanted[5], rel=1e-3
    )
    server.close()


def test_the_release_is_the_mean_of_clipped_updates(tmp_path):
    """With hardly any noise: updates within the clip norm are whole, others are clipped to it."""
    plan = small_plan(goal=GOAL, noise_multiplier=1e-3)
    server = create(tmp_path, plan, clip_norm=AdaptiveClipping(start=0.7, beta=0.5))
    for _ in range(3):
        norm, before = server.clip_norm, server.model.copy()
        attempt = server.begin(PEOPLE)
        sent = [random_update(client, attempt.number) for client in attempt.clients]
        fill(attempt, random_update)
        released = server.commit(attempt)
        clipped = [one * min(1, norm / np.linalg.norm(one)) for one in sent]
        wanted = np.mean(clipped, axis=0)
        noise = 1e-3 * norm / math.sqrt(0.75) / GOAL
        assert np.abs(released.model["w"] - before - wanted).max() < 8 * noise
    server.close()


def test_unfit_updates_add_nothing_to_the_bits(tmp_path):
    server = create(tmp_path, PLAN, clip_norm="adaptive")
    attempt = server.begin(PEOPLE)
    unfit = (np.full(SIZE, math.nan), np.zeros(SIZE + 1), "text", np.full(SIZE, 1e200))
    for client, update in zip(attempt.clients, unfit, strict=False):
        attempt.report(client, update, attempt.attempt)
    assert not attempt.reports._sum.steps.any()
    assert attempt.reports.unfit == len(unfit) == len(log(server))
    server.close()


def test_a_round_that_is_made_again_has_the_same_clip_norm(tmp_path):
    server = create(tmp_path, PLAN, clip_norm="adaptive")
    for _ in range(3):
        one_round(server, update=random_update)
    server.begin(PEOPLE)
    before = server.clip_norm
    server = reopen(server)
    assert server.clip_norm == before
    attempt = server.begin(PEOPLE)
    server.abandon(attempt, "too few")
    assert server.clip_norm == before
    one_round(server, update=random_update)
    assert server.clip_norm != before
    server.close()


def test_the_model_is_not_ruined_by_a_start_that_is_far_too_large(tmp_path):
    server = create(
        tmp_path,
        small_plan(goal=GOAL, noise_multiplier=0.05),
        clip_norm=AdaptiveClipping(start=1e4, beta=0.5),
    )
    for _ in range(8):
        released = one_round(server, update=random_update)
    assert server.clip_norm < 1e3
    assert not released.model["w"].any()
    server.close()


def test_the_guarantee_says_that_the_clip_norm_moves(tmp_path):
    server = create(tmp_path, PLAN, clip_norm="adaptive")
    one_round(server)
    (clipping,) = (one for one in server.guarantee().hypotheses if one.name == "clipping")
    assert "clip norm of its round" in clipping.text
    assert clipping.basis == "enforced"
    fixed = create(tmp_path / "fixed", PLAN, clip_norm=1.0)
    one_round(fixed)
    assert fixed.guarantee().epsilon == server.guarantee().epsilon
    server.close()
    fixed.close()


def test_a_fixed_clip_norm_writes_nothing_new(tmp_path):
    server = create(tmp_path, PLAN)
    one_round(server)
    assert "clipping" not in committed(server)[0]
    assert server.clip_norm == 1.0
    server.close()


@pytest.mark.parametrize("clip_norm", ["median", AdaptiveClipping(beta=1.0), math.nan, "2"])
def test_clip_norms_that_make_no_sense_are_refused(tmp_path, clip_norm):
    with pytest.raises(InvalidInput, match="clip_norm"):
        create(tmp_path, PLAN, clip_norm=clip_norm)
    assert Settings(clip_norm="adaptive").clip_norm == AdaptiveClipping()


def test_a_round_in_which_nobody_takes_part_has_noisy_bits_too(tmp_path):
    people = PEOPLE[:GOAL]  # the only ones that are left
    server = create(tmp_path, PLAN, clip_norm="adaptive")
    one_round(server, people, random_update)
    server.close_empty_round(people, "nobody may be contacted")
    assert server.rounds == 2
    assert len(committed(server)) == 2
    assert committed(server)[1]["clipping"]["bits"] != 0
    server.close()
    assert verify_run(tmp_path / "run", tmp_path / "state").passed


def test_aggregators_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="aggregators"):
        create(tmp_path, PLAN, clip_norm="adaptive", aggregators=True)


def test_reports_of_several_threads_give_the_same_sum(tmp_path):
    sums = []
    for threads in (1, 8):
        server = create(tmp_path / str(threads), PLAN, clip_norm=AdaptiveClipping(start=2.0))
        attempt = server.begin(PEOPLE)
        with ThreadPoolExecutor(threads) as pool:
            updates = [random_update(client, 0) for client in attempt.clients]
            attempts = [attempt.attempt] * len(updates)
            list(pool.map(attempt.report, attempt.clients, updates, attempts))
        sums.append(attempt.reports.sum().steps.tolist())
        server.close()
    assert sums[0] == sums[1]
    assert sums[0][-1] != 0
