"""Statements from files: a plan or a guarantee file, and the folder of a run."""

import hashlib
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from dpftrl._internal.progress import Progress
from dpftrl._internal.storage import read_file, read_json
from dpftrl.accounting import Guarantee, guarantee_of, load_guarantee
from dpftrl.accounting.logs import Limits
from dpftrl.accounting.logs.ledgers import observe_ledger
from dpftrl.auditing.canaries import canary_count
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.federated import Start
from dpftrl.federated.settings import RunFile
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.plan import Plan, load_plan
from dpftrl.statement.facts import Details, Input, Role, RunRecord
from dpftrl.statement.promised_and_observed import limits_of
from dpftrl.statement.statement import Statement, make_statement
from dpftrl.verify import Verdict, verify_run

GUARANTEE, LEDGER, CURVES = "guarantee.json", "ledger.csv", "curves.png"
RECORD, PRIVATE = "run.json", "private"
# For messages about a file of another kind.
TAKEN: Final = (
    "a statement is made from a plan (dpftrl plan --out), a guarantee (dpftrl account --out) or "
    "the folder of a run"
)


class Header(msgspec.Struct):
    """The field `format` of a JSON file, which says what kind of file it is."""

    format: str


def statement_of_files(
    promise: Path,
    run: Path | None,
    *,
    devices: int | None = None,
    date: str | None = None,
    on_progress: Progress | None = None,
    state_folder: Path | None = None,
    witness: bool = True,
    details: Details | None = None,
) -> Statement:
    """Make the statement of a plan or guarantee file and, optionally, of a run.

    If the private files of the run are in its folder, the run is verified. Only then can the
    statement call a hypothesis of its `guarantee.json` enforced.

    Args:
        promise: The file of a plan or a guarantee.
        run: The folder of a run. Who took part is read from its journal, or from `ledger.csv` if
            its private files are not there.
        devices: A number of devices of one person. The headline then states the guarantee for a
            person with so many devices too.
        date: The date to print, or None to print no date.
        on_progress: Called with the progress of reading the ledger.
        state_folder: The folder of the run's witness.
        witness: Whether to verify the run with its witness. Without it, the folder may be an older
            copy of the run.
        details: What the publisher says about the training.

    Raises:
        InvalidInput: A file cannot be read, or the folder is not that of a run.
    """
    promised = _load(promise)
    role: Role = "plan" if isinstance(promised, Plan) else "guarantee"
    inputs = [Input(role, _name(promise, run), _sha256(promise))]
    accounted = None if run is None else _accounted(run)
    base = accounted or (promised.guarantee if isinstance(promised, Plan) else promised)
    record = None if run is None else run_record(run)
    # The log covers only the run itself, which comes last, after the earlier runs.
    is_chain = record is not None and record.start is not None and bool(record.start.runs)
    limits = _limits(guarantee_of(base.runs[-1:], base.delta) if is_chain else base)
    said = details or Details()
    observed = None
    if run is not None:
        with _ledger(run) as ledger:
            inputs += _run_inputs(run, ledger)
            if ledger is not None:
                observed = observe_ledger(ledger, limits, on_progress=on_progress)
    return make_statement(
        promised,
        accounted=accounted,
        observed=observed,
        devices=devices,
        inputs=tuple(inputs),
        date=date,
        curves=None if run is None else _curves(run),
        verdict=None if run is None else _verdict(run, state_folder, witness),
        record=record,
        organisation=said.organisation,
        model_name=said.model_name,
        contact=said.contact,
        public_data=said.public_data,
        shipped_checkpoint=said.shipped_checkpoint,
    )


def _verdict(run: Path, state_folder: Path | None, witness: bool) -> Verdict | None:
    """Verify the run, or return None if its private files are not there."""
    if not (run / PRIVATE).exists():
        return None
    return verify_run(run, state_folder, witness=witness)


def run_record(run: Path) -> RunRecord | None:
    """Return what `run.json` says, or None if it is missing or cannot be read."""
    path = run / RECORD
    if not path.exists():
        return None
    try:
        file = read_json(path, RunFile, "run")
        start = None if file.start is None else Start.of_content(file.start, path)
    except DpftrlError:  # verification, if there is one, fails for the same reason
        return None
    return RunRecord(file.run, file.settings.population, start, file.version, canary_count(run))


def _curves(run: Path) -> bytes | None:
    path = run / CURVES
    return read_file(path) if path.exists() else None


def _load(path: Path) -> Plan | Guarantee:
    """Load a plan or a guarantee, as the `format` field of the file says."""
    try:
        kind = read_json(path, Header, "plan or guarantee").format
    except InvalidInput as error:
        if not path.is_file():
            raise
        reason = error if path.suffix == ".json" else f"{path} is not a plan or guarantee file"
        raise InvalidInput(f"{reason}; {TAKEN}") from None
    if kind == "dpftrl plan":
        return load_plan(path)
    if kind == "dpftrl guarantee":
        return load_guarantee(path)
    raise InvalidInput(f"{path} has the format {kind!r:.60}; {TAKEN}")


def _accounted(run: Path) -> Guarantee | None:
    """Load the guarantee that the run's server accounted, or return None if there is no file."""
    if not run.is_dir():
        raise InvalidInput(f"{run} is not a folder; --run takes the folder of a run")
    if not any((run / name).exists() for name in (GUARANTEE, LEDGER, PRIVATE)):
        raise InvalidInput(
            f"{run} has neither {GUARANTEE} nor {LEDGER}: it is not the folder of a run"
        )
    path = run / GUARANTEE
    return load_guarantee(path) if path.exists() else None


def _limits(base: Guarantee) -> Limits:
    """Return the limits that the log is compared with."""
    if len(base.runs) != 1:  # the log does not say which rows belong to which run
        return Limits()
    allowed = limits_of(base)
    return Limits(allowed.min_sep, allowed.max_participations)


@contextmanager
def _ledger(run: Path) -> Generator[Path | None]:
    """The ledger of a run: derived from its private files if they are there, else `ledger.csv`."""
    kept = run / LEDGER
    with ExitStack() as stack:
        path = kept if kept.exists() else None
        if (run / PRIVATE).exists():
            try:
                path = stack.enter_context(ledger_file(run))
            except DpftrlError:  # verification fails for the same reason
                path = None
        yield path


def _run_inputs(run: Path, ledger: Path | None) -> Iterator[Input]:
    """Yield the files of a run that the statement is computed from."""
    roles: dict[str, Role] = {GUARANTEE: "run guarantee", LEDGER: "log", RECORD: "run record"}
    for name, role in roles.items():
        path = ledger if name == LEDGER else run / name
        if path is not None and path.exists():
            yield Input(role, f"{Path(os.path.realpath(run)).name}/{name}", _sha256(path))


def _name(promise: Path, run: Path | None) -> str:
    """Return the name of a plan or guarantee file, with the folder of the run if it is in there."""
    real = Path(os.path.realpath(promise))
    if run is None or (folder := Path(os.path.realpath(run))) not in real.parents:
        return promise.name
    return real.relative_to(folder.parent).as_posix()


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces: a log may be larger than the memory."""
    try:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
