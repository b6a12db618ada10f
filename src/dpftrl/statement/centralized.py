"""The privacy statement of a centralized run: training on a data set, with PyTorch or JAX."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec

from dpftrl import __version__
from dpftrl._internal.formatting import probability_in_words, rounded_down, rounded_up, short_up
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.accounting.risk import Risk, point_risk, unsampled_risk
from dpftrl.adaptive_clipping import AdaptiveClipping
from dpftrl.auditing.canaries import canary_count, canary_sentence
from dpftrl.centralized import TrainingRun
from dpftrl.centralized.guarantee import TEST_KEY, GuaranteeFile, epsilon_after
from dpftrl.centralized.guarantee import guarantee_file as guarantee_of_run
from dpftrl.centralized.settings import RunFile
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.registry import mechanism_content, mechanism_from
from dpftrl.plan import load_dataset_plan
from dpftrl.statement.document import (
    Block,
    Bullets,
    Commands,
    Document,
    Notice,
    Paragraph,
    Section,
    Span,
    Table,
    html,
    markdown,
)
from dpftrl.statement.facts import Details, Evidence, StatedBasis
from dpftrl.statement.sections import DETAILS
from dpftrl.statement.statement import statement_paths
from dpftrl.verify import Verdict, verify_run

NOT_COVERED: Final = (
    "Choosing hyper-parameters: tuning runs on the same data are separate trainings.",
    "Choosing which checkpoint to ship, or when to stop, by looking at private data.",
    "Losses, clipped fractions and accuracies that were computed from private data.",
    "Data used before the training, such as public data for pre-training.",
    "Data that is processed outside of the training.",
)
SETTING: Final = (
    "Central: whoever trains has the data set, computes the gradients and adds the noise, and must "
    "be trusted. The guarantee is about everybody who sees the models of all steps, or only some "
    "of them, and knows all other data."
)
ORIGINS: Final[dict[Evidence, str]] = {
    "verified": "It is what the training enforced and accounted: the files of the run verify.",
    "failed": "It is what the run's guarantee file says, but the verification of the run failed.",
    "none": (
        "It is what the training says about itself. Its private files are not available, so "
        "nothing shows whether it was enforced."
    ),
}
SAMPLINGS: Final = {
    "none": (
        "not sampled: the same shuffled order in all epochs, so that every {unit} takes part once "
        "in every {epoch:,} steps"
    ),
    "poisson": "Poisson sampling: every {unit} is in every batch with the same probability",
    "cyclic-poisson": (
        "cyclic Poisson sampling: {groups:,} groups take turns, and every {unit} of the group is "
        "in the batch with the same probability"
    ),
    "balls-in-bins": (
        "balls-in-bins sampling: every {unit} is in one random batch of each epoch, the same in "
        "all epochs"
    ),
}


@final
@dataclass(frozen=True)
class CentralizedStatement:
    """The privacy statement of a centralized run. The same facts give the same bytes.

    Attributes:
        guarantee: The guarantee of all steps so far, as `guarantee.json` has it.
        verdict: The result of verifying the run; None if it kept no private files.
        details: What the publisher says.
        date: The date to print, or None to print no date.
        canaries: Number of canaries that were added for an audit.
    """

    guarantee: GuaranteeFile
    verdict: Verdict | None = None
    details: Details = Details()  # noqa: RUF009 - immutable
    date: str | None = None
    canaries: int = 0

    @property
    def evidence(self) -> Evidence:
        """Whether the files of the run verify."""
        if self.verdict is None:
            return "none"
        return "verified" if self.verdict.passed else "failed"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before anything else."""
        found = list[str]()
        if any(one.name == TEST_KEY.name for one in self.guarantee.hypotheses):
            found.append(TEST_KEY.text)
        if self.evidence == "failed" and self.verdict is not None:
            failed = ", ".join(c.name for c in self.verdict.checks if c.outcome == "failed")
            found.append(f"The verification of the run failed: {failed}.")
        return tuple(found)

    @property
    def summary_sentence(self) -> str:
        """The guarantee in one plain sentence."""
        one, planned = self.guarantee, self.guarantee.dataset.steps
        steps = f"All {planned:,} noisy steps of the training"
        if one.steps < planned:
            steps = f"The first {one.steps:,} of {planned:,} planned noisy steps of the training"
        return (
            f"{steps}, and with them all its models, are "
            f"({rounded_up(one.epsilon)}, {short_up(one.delta)})-differentially private, for "
            f"each {one.unit}."
        )

    @property
    def summary(self) -> str:
        """Warnings, the guarantee, the meaning of delta, and the origin of the numbers."""
        return " ".join(
            [*self.warnings, self.summary_sentence, self._delta_sentence, ORIGINS[self.evidence]]
        )

    @property
    def _delta_sentence(self) -> str:
        one = self.guarantee
        words = probability_in_words(one.delta)
        return (
            f"A delta of {short_up(one.delta)} means {words}. Except for an event with at most "
            f"this probability, epsilon bounds what anybody can learn from the releases about one "
            f"{one.unit}."
        )

    @property
    def risk(self) -> Risk:
        """How well the best possible attack does; an upper bound, from epsilon and delta."""
        one = self.guarantee
        from_point = unsampled_risk if one.sampling == "none" else point_risk
        return from_point(one.epsilon, one.delta)

    @property
    def formal_sentence(self) -> str:
        """The guarantee in one formal sentence."""
        one = self.guarantee
        return (
            "If all hypotheses hold, then for any two data sets D and D' that are neighbors by "
            f"{one.adjacency} of one {one.unit}, and for any set S of outputs, the noisy steps M "
            f"satisfy Pr[M(D) in S] ≤ exp({rounded_up(one.epsilon)}) Pr[M(D') in S] + "
            f"{short_up(one.delta)}."
        )

    @property
    def hypotheses(self) -> tuple[tuple[str, str, StatedBasis], ...]:
        """Name, text and basis of each condition; enforced only if the run verifies."""
        return tuple(
            (one.name, one.text, self._stated(one.basis)) for one in self.guarantee.hypotheses
        )

    def _stated(self, basis: str) -> StatedBasis:
        if basis == "assumed":
            return "assumed"
        return "enforced" if self.evidence == "verified" else "claimed"

    def markdown(self) -> str:
        """Return the document as Markdown."""
        return markdown(self.document)

    def html(self) -> str:
        """Return the document as a complete HTML page."""
        return html(self.document)

    def json_bytes(self) -> bytes:
        """Return the facts as JSON, with numbers in full."""
        one = self.guarantee
        content: dict[str, Any] = {
            "format": "dpftrl centralized statement",
            "version": 1,
            "summary": self.summary_sentence,
            "formal_statement": self.formal_sentence,
            "warnings": self.warnings,
            "epsilon": one.epsilon,
            "delta": one.delta,
            "failure": one.failure,
            **self.risk.as_json(),
            "unit": one.unit,
            "adjacency": one.adjacency,
            "setting": "central",
            "dataset": one.dataset,
            "steps": one.steps,
            "sampling": one.sampling,
            "groups": one.groups,
            "mechanism": one.mechanism,
            "noise_multiplier": one.noise_multiplier,
            "clip_norm": one.clip_norm,
            "hypotheses": [
                {"name": name, "text": text, "basis": basis}
                for name, text, basis in self.hypotheses
            ],
            "not_covered": NOT_COVERED,
            "run": one.run,
            "verification": None
            if self.verdict is None
            else {
                "verified": self.verdict.passed,
                "checks": {check.name: check.outcome for check in self.verdict.checks},
            },
            "dpftrl_version": __version__,
            "date": self.date,
            **({"canaries": self.canaries} if self.canaries else {}),
            **({"publisher": self.details.given()} if self.details.given() else {}),
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    @property
    def document(self) -> Document:
        """The text of the statement, before rendering."""
        one = self.guarantee
        introduction: list[Block] = [
            Notice((Span("Attention.", "strong"), " ", warning)) for warning in self.warnings
        ]
        introduction.append(
            Paragraph(
                "This statement says what the training guarantees to the people whose data it "
                "uses, and on which hypotheses the guarantee rests."
            )
        )
        if self.date is not None:
            introduction.append(Paragraph(f"Date: {self.date}."))
        if given := self.details.given():
            caption = "What the publisher says about the training. dpftrl did not check it."
            rows = tuple((DETAILS[name], text) for name, text in given.items())
            introduction.append(Table(caption, ("", "as stated"), rows))
        summary = [
            self.summary_sentence,
            self._delta_sentence,
            self.risk.sentence(f"the data of {'an' if one.unit == 'example' else 'a'} {one.unit}"),
            ORIGINS[self.evidence],
        ]
        return Document(
            "Privacy statement",
            tuple(introduction),
            (
                Section("Summary", tuple(map(Paragraph, summary))),
                Section("1. Setting", (Paragraph(SETTING),)),
                Section("2. What the guarantee is about", self._definition()),
                Section("3. Hypotheses", (self._hypothesis_table(),)),
                Section("4. Accounting", self._accounting()),
                Section("5. Verification", self._verification()),
            ),
        )

    def _definition(self) -> tuple[Block, ...]:
        one = self.guarantee
        unit = (
            "The unit of privacy is one example of the data set."
            if one.unit == "example"
            else "The unit of privacy is one user, with all of the user's examples."
        )
        neighbors = (
            f"Two data sets are neighbors if one {one.unit} of the first has no influence in the "
            f"second (zero-out). The number of {one.unit}s, {one.dataset.size:,}, is public."
        )
        return (
            Paragraph(unit),
            Paragraph(neighbors),
            Paragraph("The output is the noisy sum of every step, and so every model."),
            Paragraph("Not covered:"),
            Bullets(NOT_COVERED),
        )

    def _hypothesis_table(self) -> Table:
        rows = tuple((name, text, Span(basis, basis)) for name, text, basis in self.hypotheses)
        caption = "What must be true for the guarantee, and how it is known."
        return Table(caption, ("", "hypothesis", "basis"), rows)

    def _accounting(self) -> tuple[Block, ...]:
        one = self.guarantee
        sampling = SAMPLINGS[one.sampling].format(
            unit=one.unit, epoch=one.dataset.steps_per_epoch, groups=one.groups or 1
        )
        rows = [
            ("mechanism", one.mechanism.family),
            ("noise multiplier", rounded_down(one.noise_multiplier)),
            ("clip norm", _clip_norm_text(one.clip_norm)),
            (f"{one.unit}s", f"{one.dataset.size:,}"),
            ("planned batch size", f"{one.dataset.batch_size:,}"),
            ("steps", f"{one.steps:,} of {one.dataset.steps:,} planned"),
            ("batches", sampling),
            ("epsilon", rounded_up(one.epsilon)),
            ("delta", short_up(one.delta)),
        ]
        if one.failure:
            rows.append(("probability that the certificate is wrong", rounded_up(one.failure)))
        return (
            Table("The numbers behind epsilon.", ("", "value"), tuple(rows)),
            Paragraph(self.formal_sentence),
            *([Paragraph(canary_sentence(self.canaries))] if self.canaries else []),
        )

    def _verification(self) -> tuple[Block, ...]:
        text = (
            "Whoever has the folder of the run, with its private part, can recompute the guarantee "
            "with code that shares nothing with the training:"
        )
        blocks: list[Block] = [Paragraph(text), Commands(("dpftrl verify RUN",))]
        if self.verdict is not None:
            rows = tuple((check.name, check.outcome) for check in self.verdict.checks)
            blocks.append(Table("The checks of this run.", ("check", "result"), rows))
        return tuple(blocks)


def centralized_statement(
    folder: str | os.PathLike[str],
    *,
    state_folder: Path | None = None,
    witness: bool = True,
    details: Details | None = None,
    date: str | None = None,
) -> CentralizedStatement:
    """Make the statement of a centralized run from its files.

    Args:
        folder: The folder of the run.
        state_folder: The folder of the run's witness.
        witness: Whether to verify the run with its witness.
        details: What the publisher says about the training.
        date: The date to print, or None to print no date.

    Raises:
        InvalidInput: The folder has no guarantee of a centralized run.
    """
    root = Path(folder)
    path = root / "guarantee.json"
    if not path.exists():
        raise InvalidInput(f"{root} has no guarantee.json: no step was saved yet")
    read_json(root / "run.json", RunFile, "centralized run")
    guarantee = read_json(path, GuaranteeFile, "centralized guarantee")
    verdict = None
    if (root / "private").exists():
        verdict = verify_run(root, state_folder, witness=witness)
    else:
        _check_with_plan(guarantee, root / "plan.json")
    return CentralizedStatement(
        guarantee, verdict, details or Details(), date, canaries=canary_count(root)
    )


def _check_with_plan(guarantee: GuaranteeFile, path: Path) -> None:
    """Refuse a guarantee that the plan of the run does not give.

    Raises:
        InvalidInput: The plan is missing, or says something else.
    """
    plan = load_dataset_plan(path)
    is_same = (
        guarantee.dataset,
        guarantee.sampling,
        guarantee.noise_multiplier,
        guarantee.delta,
        mechanism_from(guarantee.mechanism, path),
    ) == (plan.dataset, plan.sampling, plan.noise_multiplier, plan.guarantee.delta, plan.mechanism)
    if (
        not is_same
        or not 1 <= guarantee.steps <= plan.dataset.steps
        or not guarantee.epsilon >= epsilon_after(plan, guarantee.steps) * (1 - 1e-9)
        or guarantee.failure < plan.failure
    ):
        raise InvalidInput(
            f"{path.with_name('guarantee.json')} does not follow from {path}: it was edited, or "
            "belongs to another run"
        )


def save_centralized_statement(
    run: TrainingRun, stem: str | os.PathLike[str]
) -> CentralizedStatement:
    """Write the statement of all steps so far to three files (.md, .html and .json).

    Args:
        run: The run.
        stem: The path of the files without suffix.
    """
    run.check_open()
    if not run.released:
        raise InvalidInput("no step was done yet, so there is nothing to state")
    if run.store is None:
        mechanism = mechanism_content(run.plan.mechanism, Path("guarantee.json"))
        statement = CentralizedStatement(
            guarantee_of_run(run.plan, run.file, run.released, mechanism)
        )
    else:
        run.store.publish(run.released)
        statement = centralized_statement(
            run.store.folder.root, state_folder=run.store.state_folder
        )
    write_centralized_statement(statement, stem)
    return statement


def write_centralized_statement(
    statement: CentralizedStatement, stem: str | os.PathLike[str]
) -> tuple[Path, ...]:
    """Write a statement to three files, and return their paths."""
    paths = statement_paths(stem)
    contents = (
        statement.markdown().encode(),
        statement.html().encode(),
        statement.json_bytes(),
    )
    for path, content in zip(paths, contents, strict=True):
        replace_file(path, content)
    return paths


def _clip_norm_text(clip_norm: float | AdaptiveClipping) -> str:
    """The clip norm in words."""
    if isinstance(clip_norm, AdaptiveClipping):
        return f"adaptive, to quantile {clip_norm.quantile:g} of the norms of gradients"
    return f"{clip_norm:g}"
