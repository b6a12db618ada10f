"""The statement of a centralized run: what it says, what it must not say, and three equal files."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page, page_of_markdown
from small_training_runs import (
    DATASET,
    EXAMPLES,
    PLAN,
    STEPS,
    Place,
    Trainer,
    fast_places,
    journal_records,
    plan_in_order,
    poisson_plan,
)

from dpftrl.centralized import Units
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.plan import Dataset
from dpftrl.statement.centralized import (
    CentralizedStatement,
    centralized_statement,
    save_centralized_statement,
)
from dpftrl.statement.facts import Details
from dpftrl.verify.centralized_files import is_centralized

OWNERS = [n % 6 for n in range(EXAMPLES)]


def trained(place: Place, until: int | None = None, **options: Any) -> Place:
    """A run with a real key, which was closed after some steps."""
    with Trainer.create(place, **{"insecure_test_key": None, **options}) as trainer:
        trainer.train(until)
    return place


def statement_of(place: Place, **options: Any) -> CentralizedStatement:
    return centralized_statement(place.folder, state_folder=place.state, **options)


def bases(statement: CentralizedStatement) -> dict[str, str]:
    return {name: basis for name, _, basis in statement.hypotheses}


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture
def place(places) -> Place:
    return next(places)


@pytest.fixture(scope="module")
def finished() -> Iterator[Place]:
    """A finished run, which no test may change."""
    with fast_places() as found:
        yield trained(next(found))


@pytest.fixture(scope="module")
def honest(finished) -> CentralizedStatement:
    return statement_of(finished)


# --- What it says --------------------------------------------------------------------------------


def test_a_finished_run_is_verified_and_its_conditions_are_enforced(honest):
    assert honest.evidence == "verified"
    assert honest.warnings == ()
    enforced = {name for name, basis in bases(honest).items() if basis == "enforced"}
    assert enforced == {"participation", "clipping", "batch size", "steps"}
    assert set(bases(honest).values()) == {"enforced", "assumed"}
    assert honest.summary.startswith(f"All {STEPS} noisy steps of the training")
    assert "the files of the run verify" in honest.summary
    assert "| steps | 12 of 12 planned |" in honest.markdown()
    assert "for each example" in honest.summary


def test_a_user_level_run_names_users_everywhere(place):
    plan = plan_in_order(Dataset(6, 2, 2))
    trained(place, plan=plan, units=Units(EXAMPLES, OWNERS, 2))
    statement = statement_of(place)
    text = statement.markdown()
    assert statement.evidence == "verified"
    assert "for each user." in statement.summary
    assert "The unit of privacy is one user, with all of the user's examples." in text
    assert "The number of users, 6, is public" in text
    assert "Every example belongs to one user" in text
    assert "one example" not in text.replace("Every example belongs to one user", "")
    assert bases(statement)["users"] == "assumed"
    assert json.loads(statement.json_bytes())["unit"] == "user"


def test_a_run_with_sampling_says_how_batches_are_drawn(place):
    trained(place, plan=poisson_plan())
    text = centralized_statement(place.folder, state_folder=place.state).markdown()
    assert "Poisson sampling: every example is in every batch with the same probability" in text
    assert "takes part once in every" not in text
    assert "the batches stay secret" in text


def test_an_unfinished_run_covers_its_checkpoint(place):
    trained(place, 6)
    statement = statement_of(place)
    assert statement.evidence == "verified"
    assert "The first 6 of 12 planned noisy steps" in statement.summary
    assert "| steps | 6 of 12 planned |" in statement.markdown()
    assert statement.guarantee.epsilon < PLAN.guarantee.epsilon


def test_an_unfinished_run_covers_every_step_of_its_journal_or_warns(place):
    """The models after steps 4 and 5 existed, and may have been published."""
    trained(place, 5)
    with Trainer.resume(place) as trainer:
        epsilon = trainer.run.epsilon
    statement = statement_of(place)
    assert statement.guarantee.epsilon >= epsilon or statement.warnings


def test_an_open_run_states_all_its_steps(place, tmp_path):
    with Trainer.create(place, insecure_test_key=None) as trainer:
        with pytest.raises(InvalidInput, match="no step"):
            save_centralized_statement(trainer.run, tmp_path / "none")
        trainer.train(5)
        statement = save_centralized_statement(trainer.run, tmp_path / "own")
        assert (statement.guarantee.steps, statement.evidence) == (5, "verified")
        assert statement.guarantee.epsilon == trainer.run.epsilon
        trainer.train()
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == STEPS


def test_a_resumed_run_states_the_steps_that_it_must_repeat(place, tmp_path):
    trained(place, 5)
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == 3
        statement = save_centralized_statement(trainer.run, tmp_path / "own")
    assert statement.guarantee.steps == 5


def test_a_statement_in_the_middle_does_not_make_the_guarantee_file_too_small(place, tmp_path):
    """A checkpoint comes after step 6; a process that is killed after step 5 writes nothing."""
    with Trainer.create(place, insecure_test_key=None) as trainer:
        trainer.train(4)
        save_centralized_statement(trainer.run, tmp_path / "own")
        trainer.train(5)
        epsilon = trainer.run.epsilon
    statement = statement_of(place)
    assert statement.guarantee.epsilon >= epsilon or statement.warnings


def test_a_closed_run_does_not_change_the_guarantee_of_a_newer_one(place, tmp_path):
    with Trainer.create(place, insecure_test_key=None) as old:
        old.train(3)
    with Trainer.resume(place) as trainer:
        trainer.train()
    before = (place.folder / "guarantee.json").read_bytes()
    with pytest.raises(UnsafeState):
        save_centralized_statement(old.run, tmp_path / "old")
    assert (place.folder / "guarantee.json").read_bytes() == before


def test_the_witness_is_where_the_run_put_it(place, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "default"))
    with Trainer.create(place, insecure_test_key=None) as trainer:
        trainer.train(3)
        assert save_centralized_statement(trainer.run, tmp_path / "own").evidence == "verified"


# --- Runs that cannot be checked, or fail the check ----------------------------------------------


def test_a_run_without_a_folder_only_claims(tmp_path):
    with Trainer.create(None, insecure_test_key=None) as trainer:
        trainer.train()
        statement = save_centralized_statement(trainer.run, tmp_path / "own")
    assert (statement.evidence, statement.verdict, statement.warnings) == ("none", None, ())
    assert set(bases(statement).values()) == {"claimed", "assumed"}
    assert "nothing shows whether it was enforced" in statement.summary
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8").replace("whether it was enforced", "")
        body = text.split("</style>")[-1]
        assert "enforced" not in body
    assert json.loads((tmp_path / "own.json").read_bytes())["verification"] is None


def test_the_public_files_alone_only_claim(finished, tmp_path):
    for name in ("run.json", "plan.json", "guarantee.json"):
        (tmp_path / name).write_bytes((finished.folder / name).read_bytes())
    assert is_centralized(tmp_path)
    statement = centralized_statement(tmp_path)
    assert statement.evidence == "none"
    assert "enforced" not in bases(statement).values()


@pytest.mark.parametrize(
    "changes", [{"epsilon": 0.5}, {"epsilon": -1.0}, {"noise_multiplier": 90.0}, {"steps": 10**9}]
)
def test_an_edited_guarantee_without_private_files_is_refused(finished, tmp_path, changes):
    for name in ("run.json", "plan.json"):
        (tmp_path / name).write_bytes((finished.folder / name).read_bytes())
    content = json.loads((finished.folder / "guarantee.json").read_bytes())
    (tmp_path / "guarantee.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(InvalidInput):
        centralized_statement(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["checkpoint", "epsilon", "journal", "plan", "hypothesis"])
def test_a_changed_run_is_reported_and_nothing_is_called_enforced(place, what):
    trained(place)
    path = place.folder / "guarantee.json"
    content = json.loads(path.read_bytes())
    if what == "checkpoint":
        flip(place.folder / "private" / "checkpoints" / "00000012.safetensors")
    elif what == "journal":
        lines = place.journal.read_bytes().splitlines(keepends=True)
        place.journal.write_bytes(b"".join(lines[:-2]))
    elif what == "plan":
        plan = place.folder / "plan.json"
        plan.write_bytes(plan.read_bytes() + b"\n")
    elif what == "epsilon":
        path.write_text(json.dumps({**content, "epsilon": content["epsilon"] / 2}))
    else:
        content["hypotheses"][-1]["basis"] = "enforced"
        path.write_text(json.dumps(content))
    statement = statement_of(place)
    assert statement.evidence == "failed"
    (warning,) = statement.warnings
    assert statement.summary.startswith(warning)
    assert warning.startswith("The verification of the run failed: ")
    assert "enforced" not in bases(statement).values()
    assert "**Attention.** The verification" in statement.markdown().split("##")[0]
    written = json.loads(statement.json_bytes())
    assert written["warnings"] == [warning]
    assert written["verification"]["verified"] is False
    assert "the files of the run verify" not in statement.markdown()


def test_a_test_key_is_the_first_warning(place, tmp_path):
    trained(place, insecure_test_key=5)
    with Trainer.create(None) as trainer:
        trainer.train()
        kept_nothing = save_centralized_statement(trainer.run, tmp_path / "own")
    for statement in (statement_of(place), kept_nothing):
        assert "no privacy at all" in statement.warnings[0]
        assert statement.summary.startswith("The noise key is a test key")
        assert "no privacy at all" in statement.markdown().split("##")[0]
        assert "enforced" not in bases(statement).values()
        text = Page(statement.html()).text
        assert text.index("no privacy at all") < text.index("-differentially private")
        assert "no privacy at all" in json.loads(statement.json_bytes())["warnings"][0]


def test_a_folder_without_a_saved_step_is_refused(place, tmp_path):
    trained(place, 0)
    with pytest.raises(InvalidInput, match="no guarantee"):
        statement_of(place)
    with pytest.raises(InvalidInput, match="no guarantee"):
        centralized_statement(tmp_path)
    assert not is_centralized(tmp_path)


# --- Numbers -------------------------------------------------------------------------------------


def with_numbers(honest: CentralizedStatement, **numbers: float) -> CentralizedStatement:
    import msgspec

    return CentralizedStatement(msgspec.structs.replace(honest.guarantee, **numbers))


@pytest.mark.parametrize("seed", range(5))
def test_numbers_are_rounded_to_the_safe_side(honest, seed):
    generator = np.random.default_rng(seed)
    epsilon, noise = (float(10 ** generator.uniform(-2, 3)) for _ in range(2))
    delta = float(10 ** generator.uniform(-12, -3))
    statement = with_numbers(honest, epsilon=epsilon, noise_multiplier=noise, delta=delta)
    rows = dict(
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in statement.markdown().splitlines()
        if line.count("|") == 3
    )
    for name, exact, direction in (
        ("epsilon", epsilon, 1),
        ("delta", delta, 1),
        ("noise multiplier", noise, -1),
    ):
        shown = float(rows[name])
        assert direction * (shown - exact) >= 0, name
        assert math.isclose(shown, exact, rel_tol=1e-3), name
    assert f"({rows['epsilon']}, {rows['delta']})-differentially private" in statement.summary
    assert f"exp({rows['epsilon']})" in statement.formal_sentence
    written = json.loads(statement.json_bytes())
    assert (written["epsilon"], written["noise_multiplier"]) == (epsilon, noise)
    assert written["delta"] == delta


def test_the_json_file_equals_the_guarantee_file_in_full(honest, finished):
    written = json.loads(honest.json_bytes())
    stated = json.loads((finished.folder / "guarantee.json").read_bytes())
    own = {"format", "version", "hypotheses"}
    assert {name: written[name] for name in stated if name not in own} == {
        name: value for name, value in stated.items() if name not in own
    }
    assert written["hypotheses"] == stated["hypotheses"]
    assert written["epsilon"] == PLAN.guarantee.epsilon
    assert written["date"] is None
    assert "publisher" not in written
    assert set(written["verification"]["checks"].values()) == {"passed"}


# --- The three files -----------------------------------------------------------------------------


def test_markdown_and_html_have_the_same_words(finished):
    details = Details("A & B <b>|", "model *x*", None, None, None)
    statement = statement_of(finished, details=details, date="2026-01-31")
    page = Page(statement.html())
    words = page_of_markdown(statement.markdown()).words
    assert page.title == "Privacy statement"
    assert [w for w in page.words if w not in words] == []
    assert [w for w in words if w not in page.words] == []
    assert "A & B <b>|" in page.text
    assert "Date: 2026-01-31." in page.text
    written = json.loads(statement.json_bytes())
    assert written["date"] == "2026-01-31"
    assert "A & B <b>|" in written["publisher"].values()
    for fact in (written["summary"], written["formal_statement"], *written["not_covered"]):
        assert " ".join(fact.split()) in " ".join(page.words)
    for one in written["hypotheses"]:
        assert one["text"] in " ".join(page.words)
    for name in written["verification"]["checks"]:
        assert name in page.text


def test_the_same_facts_give_the_same_bytes(honest, finished):
    again = statement_of(finished)
    assert again.markdown() == honest.markdown()
    assert again.html() == honest.html()
    assert again.json_bytes() == honest.json_bytes()
    assert str(finished.folder) not in honest.markdown() + honest.html()
    assert str(finished.folder).encode() not in honest.json_bytes()


def test_no_private_number_is_in_a_statement(honest, finished):
    private = finished.folder / "private"
    records = journal_records(finished)
    with Trainer.resume(finished) as trainer:
        batches = [trainer.run.batch(step).examples.tolist() for step in range(DATASET.steps)]
        model = [repr(value) for value in trainer.model.tolist()]
    secrets = [
        (private / "noise.key").read_bytes().hex(),
        *(one["digest"] for one in records if one["kind"] == "step"),
        *(one["checkpoint_sha256"] for one in records if "checkpoint_sha256" in one),
        records[0]["key_fingerprint"],
        *(str(batch).strip("[]") for batch in batches),
        *model,
    ]
    for text in (honest.markdown(), honest.html(), honest.json_bytes().decode()):
        for secret in secrets:
            assert secret not in text


def test_a_jax_run_does_not_claim_the_checks_of_the_torch_code(tmp_path):
    """JAX computes each gradient alone; nothing refuses layers, and nothing compares gradients."""
    with Trainer.create(None, insecure_test_key=None, changes={"framework": "jax"}) as trainer:
        trainer.train(3)
        text = save_centralized_statement(trainer.run, tmp_path / "own").markdown()
    assert "Layers that mix examples are refused" not in text
