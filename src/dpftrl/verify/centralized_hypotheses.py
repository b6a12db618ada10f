"""What the guarantee of a centralized run rests on, written down a second time."""

from dpftrl.errors import UnsafeState
from dpftrl.verify.centralized_files import CentralizedFiles
from dpftrl.verify.run_files import (
    HypothesisContent,
)


def expected_hypotheses(files: CentralizedFiles) -> tuple[HypothesisContent, ...]:
    """Return the hypotheses that the guarantee of a run must state, word by word."""
    run, plan = files.run, files.plan
    unit, data = run.settings.unit, plan.dataset
    if plan.sampling == "none":
        batches = HypothesisContent(
            "participation",
            f"Every {unit} takes part once in every {data.steps_per_epoch:,} steps, always at the "
            "same place: all epochs use the same shuffled order.",
            "enforced",
        )
        secret = "The noise key and the noise state stay secret,"
    else:
        batches = HypothesisContent(
            "sampling",
            f"Batches are drawn by {plan.sampling} sampling with the secret key of the run.",
            "enforced",
        )
        secret = "The key, the noise state and the batches stay secret,"
    enforced = (
        batches,
        HypothesisContent("clipping", run.settings.clipping, "enforced"),
        HypothesisContent(
            "batch size",
            f"Sums are divided by the planned batch size, {data.batch_size:,}, and never by the "
            "actual size of a batch.",
            "enforced",
        ),
        HypothesisContent(
            "steps",
            f"There are at most {data.steps:,} steps; a further one is refused. If the number of "
            "steps was chosen by looking at the run, the guarantee of all planned steps holds.",
            "enforced",
        ),
    )
    alone = "It is computed from its own rows alone, by a function without side effects."
    compared = (
        "Layers that mix examples are refused, and two gradients are checked at the first step; "
        "code of the model or of the loss that mixes them at other times is not noticed."
    )
    assumed = {
        "data set": f"The number of {unit}s, {data.size:,}, is public, and the data set is the "
        "same in all steps.",
        "batches": "Every step is given the rows that the loader yielded for it, and their shape "
        "does not depend on who else is in the batch.",
        "independence": f"The gradient of one {unit} does not depend on the data of another "
        f"{unit}. {alone if run.settings.framework == 'jax' else compared}",
        "other outputs": "Nothing else that depends on the data set is published: no losses, no "
        "accuracy on the data set, no choice of settings, of checkpoints or of the time to stop by "
        "them.",
        "start": "The model before the first step does not depend on the data set, or is public.",
        "keystream": "The noise comes from a keyed pseudo-random keystream that nobody without its "
        "key can tell from random bits: the guarantee is computational.",
        "secrecy": f"{secret} and no row of noise covers two different sums.",
    }
    if unit == "user":
        assumed["users"] = (
            "Every example belongs to one user, and all examples of a user have the same name."
        )
    if run.settings.sharded:
        assumed["ranks"] = (
            "All ranks run the same code on the same data set, and nobody else reads or changes "
            "what they send to each other."
        )
    if plan.failure:
        assumed["certificate"] = (
            "The certificate from random samples, on which epsilon rests, is right; `failure` "
            "bounds the probability that it is not."
        )
    if run.test_key:
        assumed["test key"] = (
            "The noise key is a test key that anybody can guess: there is no privacy at all."
        )
    rest = (HypothesisContent(name, text, "assumed") for name, text in assumed.items())
    return (*enforced, *rest)


def check_hypotheses(stated: tuple[HypothesisContent, ...], files: CentralizedFiles) -> str:
    """Check that a guarantee states the hypotheses of this run, and nothing else.

    Raises:
        UnsafeState: A hypothesis is missing, was added, or has another text or basis.
    """
    expected = expected_hypotheses(files)
    if stated == expected:
        return f"all {len(stated)} hypotheses are those of such a run, word by word"
    names, expected_names = [one.name for one in stated], [one.name for one in expected]
    for name in (*expected_names, *names):
        if names.count(name) != expected_names.count(name):
            raise UnsafeState(
                f"guarantee.json must state the hypothesis {name!r:.40} "
                f"{expected_names.count(name)} time(s), and states it {names.count(name)} time(s)"
            )
    by_name = {one.name: one for one in stated}
    for one in expected:
        if by_name[one.name].basis != one.basis:
            raise UnsafeState(
                f"the hypothesis {one.name!r} is {one.basis}, and guarantee.json says that it is "
                f"{by_name[one.name].basis}"
            )
        if by_name[one.name].text != one.text:
            raise UnsafeState(
                f"the text of the hypothesis {one.name!r} in guarantee.json was changed; for this "
                f"run it is: {one.text}"
            )
    raise UnsafeState("the hypotheses in guarantee.json are in another order")
