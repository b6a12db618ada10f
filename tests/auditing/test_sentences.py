"""Black-box audits: canary sentences are guessed from the released model alone."""

import json

import numpy as np
import pytest
from sentence_runs import CANARIES, create, trained, trained_with_hardly_any_noise

from dpftrl import InvalidInput, MinSep
from dpftrl.auditing.canaries import PUBLIC, SECRET, SEEN, SecretFile, read_secrets
from dpftrl.auditing.run import audit_run
from dpftrl.auditing.sentences import (
    WORDS,
    SentenceFile,
    guess_extremes,
    read_sentence_file,
    sentence_file,
)
from dpftrl.errors import UnsafeState
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, SPECIAL

MODEL = {"name": "window", "vocabulary": 100, "embedding": 4, "words": 2, "hidden": 4}


def described(canaries=50, participation=None, length=12) -> SentenceFile:
    participation = participation or MinSep(30, 4)
    return sentence_file(canaries, participation, MODEL, sentence_length=length, copies=3)


# --- Sentences and rounds ------------------------------------------------------------------------


def test_sentences_are_random_words_of_the_vocabulary():
    file, secret = described(), SecretFile.toss(50)
    rows = file.sentences(secret)
    assert rows.shape == (50, 13)
    assert np.all(rows[:, 0] == BEGIN)
    words = rows[:, 1 : WORDS + 1]
    assert SPECIAL <= words.min() <= words.max() < 100
    assert len(np.unique(words)) > 60  # all of the vocabulary, not the frequent words
    assert np.all(rows[:, WORDS + 1] == END)
    assert np.all(rows[:, WORDS + 2 :] == PAD)
    assert len(np.unique(rows, axis=0)) == 50
    assert np.array_equal(rows, file.sentences(secret))
    assert not np.array_equal(rows, file.sentences(SecretFile.toss(50)))


def test_short_sentences_have_no_room_for_an_end():
    rows = described(length=6).sentences(SecretFile.toss(50))
    assert np.all(rows[:, 1:] >= SPECIAL)


def test_a_canary_client_has_its_sentence_many_times():
    file, secret = described(), SecretFile.toss(50)
    users = file.users(secret)
    assert len(users) == 50
    for canary in (0, 7, 49):
        assert np.array_equal(users.of(canary), np.repeat(file.sentences(secret)[[canary]], 3, 0))


@pytest.mark.parametrize(
    "participation",
    [MinSep(30, 4), MinSep(30, 4, 2), MinSep(7, 7), MinSep(5, 9), MinSep(6, 1), MinSep(6, 1, 3)],
)
def test_canaries_keep_to_the_participation_and_use_it_up(participation):
    file = described(40, participation)
    for canary in range(40):
        rounds = list(file.rounds_of(canary))
        assert rounds
        assert 0 <= rounds[0] <= rounds[-1] < participation.rounds
        assert np.all(np.diff(rounds) >= participation.min_sep)
        assert len(rounds) <= participation.max_participations
    assert len(file.rounds_of(0)) == participation.max_participations
    # Canaries begin in different rounds, so that no round has all of them unless it must.
    firsts = {file.rounds_of(canary)[0] % participation.min_sep for canary in range(40)}
    assert len(firsts) == min(participation.min_sep, participation.rounds)


def test_too_few_canaries_to_guess_a_quarter_are_refused():
    with pytest.raises(InvalidInput, match="canaries"):
        described(3)


def test_the_extremes_are_guessed():
    scores = np.array([3.0, -1.0, 0.0, 2.0, -2.0, 1.0, 0.5, -0.5, 9.0])
    included = scores > 0
    assert guess_extremes(scores, included) == (9, 4, 4)
    assert guess_extremes(scores, ~included) == (9, 4, 0)
    swapped = included.copy()
    swapped[8] = False  # the highest score belongs to one that was not included
    assert guess_extremes(scores, swapped) == (9, 4, 3)


# --- Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A run with the noise of its claim."""
    return trained(tmp_path_factory.mktemp("noisy"), rounds=6)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A run that claims epsilon 2, with a thousandth of the noise that this needs."""
    root = tmp_path_factory.mktemp("bare")
    return trained_with_hardly_any_noise(root, epsilon=2.0, rounds=24)


def test_a_correct_run_is_consistent_with_its_claim(noisy):
    found = audit_run(noisy)
    assert found.claim.epsilon == pytest.approx(8.0, rel=1e-3)
    assert not found.exceeds_claim
    assert found.p_value > 0.05
    assert found.kind == "sentences"
    assert found.guesses[:2] == (CANARIES, CANARIES // 2)
    assert found.rounds == 6


def test_without_noise_the_attack_beats_chance_and_the_claim(bare):
    """The negative control: what the model learned by heart is found in it."""
    found = audit_run(bare)
    assert found.guesses.correct >= 0.9 * found.guesses.guesses
    assert found.scores[found.included].mean() > found.scores[~found.included].mean() + 1
    assert found.exceeds_claim
    assert found.mu_general > found.claim.mu
    assert found.p_value < 0.05


def test_the_test_for_independent_noise_is_not_used(bare):
    found = audit_run(bare)
    assert found.mu_independent is None
    content = json.loads(json.dumps(found.as_json()))
    assert not {"mu_independent", "epsilon_independent"} & set(content)
    assert (content["canary_kind"], content["canaries"]) == ("sentences", CANARIES)
    assert content["lower_bound"] == content["epsilon_general"] > content["epsilon"]


def test_the_attack_uses_the_released_model_alone(bare):
    assert not (bare / SEEN).exists()
    checkpoint = bare / "private" / "checkpoints" / "00000024.safetensors"
    content = bytearray(checkpoint.read_bytes())
    before = audit_run(bare).scores
    try:
        content[-1] ^= 1
        checkpoint.write_bytes(content)
        with pytest.raises(UnsafeState, match="changed"):
            audit_run(bare)
    finally:
        content[-1] ^= 1
        checkpoint.write_bytes(content)
    assert np.array_equal(audit_run(bare).scores, before)


def test_a_changed_public_file_is_noticed(bare):
    path = bare / PUBLIC
    content = path.read_bytes()
    try:
        path.write_bytes(content.replace(b'"copies": 16', b'"copies": 17'))
        with pytest.raises(UnsafeState, match=PUBLIC):
            audit_run(bare)
    finally:
        path.write_bytes(content)


def test_the_statement_says_that_canaries_are_there(noisy):
    text = (noisy / "statement.md").read_text()
    assert f"{CANARIES} artificial participants" in text
    assert json.loads((noisy / "statement.json").read_text())["canaries"] == CANARIES


def test_scores_are_losses_under_the_start_model_minus_those_under_the_released_one(noisy):
    from dpftrl.federated import Layout, RunFolder
    from dpftrl.federated.store.run_store import released_model
    from dpftrl.tasks.language_model import evaluate

    file, secret = read_sentence_file(noisy), read_secrets(noisy)
    model = file.network()
    rounds, vector = released_model(RunFolder(noisy))
    assert rounds == 6
    arrays = Layout.of(model.init(0)).arrays(vector)
    rows = file.sentences(secret)
    # By an independent function: the mean loss of one sentence, times its words.
    losses = [
        evaluate(model, arrays, rows[[i]]).cross_entropy * file.words for i in range(0, 120, 10)
    ]
    learned = np.array(secret.start_losses)[::10] - losses
    scores = audit_run(noisy).scores[::10]
    assert np.allclose(learned - learned[0], scores - scores[0], atol=1e-4)


def test_a_run_that_has_released_nothing_is_refused(tmp_path):
    with create(tmp_path / "new", canaries=8):
        pass
    with pytest.raises(InvalidInput, match="released nothing"):
        audit_run(tmp_path / "new" / "run")


def test_secrets_can_be_read_by_the_owner_only(noisy):
    assert (noisy / SECRET).stat().st_mode & 0o777 == 0o600
