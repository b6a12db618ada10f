"""How much of a claimed epsilon audits show, for every mechanism, for sampled batches and for runs.

    PYTHONPATH=src python benchmarks/auditing.py mechanisms sampled runs

prints the tables of docs/auditing.md. Every mechanism is audited with the noise that its claim
needs, with noise that is 10% too small, and, for runs, with noise that is divided by 4. Times are
seconds of all processors together.
"""

import sys
import tempfile
import time
from pathlib import Path

import dpftrl.federated.store.run_store as run_store
from dpftrl import BallsInBins, CyclicPoisson, Independent, MinSep, Poisson, Toeplitz, mechanism
from dpftrl.auditing.mechanism import CLIP_NORM, audit_mechanism
from dpftrl.auditing.run import audit_run
from dpftrl.auditing.sampled import audit_sampled
from dpftrl.noise import NoiseStream
from dpftrl.verify import verify_run

CLIENTS = MinSep(16, min_sep=4)
NAMES = (
    "independent",
    "blt",
    "blt-b400",
    "gblt:0.9@0.2,0.5@0.1",
    "sqrt",
    "band-sqrt",
    "toeplitz:1,0.5,0.25",
    "banded",
    "inv-sqrt:4",
    "banded-inverse:1,-0.5",
    "lambda:0.8",
    "tree",
    "tree-vanilla",
    "tree-full",
    "smooth-tree",
)
DELTA = 0.01
MU = 1.0


def too_small(chosen, noise_multiplier, factor):
    """Streams with less noise than was planned."""

    def make(size, key):
        return NoiseStream.unchecked(
            chosen,
            size,
            noise_multiplier=factor * noise_multiplier,
            key=key,
            clip_norm=CLIP_NORM,
            mode="buffered",
        )

    return make


def mechanisms() -> None:
    """Audit every mechanism at mu 1, with the planned noise and with 10% less."""
    print(f"{CLIENTS}, delta {DELTA:g}, confidence 0.99999\n")
    print(
        "| mechanism | claimed epsilon | lower bound | share | 10% less noise | trials | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in NAMES:
        chosen = mechanism(name, CLIENTS)
        scale = chosen.sensitivity(CLIENTS).value / MU
        started = time.process_time()
        right = audit_mechanism(chosen, CLIENTS, scale, DELTA)
        seconds = time.process_time() - started
        trials = right.counts.trials
        make = too_small(chosen, scale, 0.9)
        wrong = audit_mechanism(chosen, CLIENTS, scale, DELTA, trials=trials, make_stream=make)
        found = "detected" if wrong.exceeds_claim else "not detected"
        if not right.is_attained:
            found += f" (only mu {right.attained_mu:.3f} is attained)"
        print(
            f"| {name} | {right.claim.epsilon:.3f} | {right.lower_bound:.3f} | {right.ratio:.1%} | "
            f"{found} | {trials:,} | {seconds:.1f} |",
            flush=True,
        )


def sampled() -> None:
    """Audit the three samplings."""
    print("\n| sampling | mechanism | claimed epsilon | lower bound | share | halved noise |")
    print("|---|---|---|---|---|---|")
    bands = Toeplitz([1.0, 0.6, 0.3, 0.2])
    for sampling, chosen, scale in (
        (Poisson(1000, 100, 20), Independent(), 1.0),
        (CyclicPoisson(1000, 100, 20, groups=4), bands, 1.5),
        (BallsInBins(1000, 100, 20), mechanism("blt-b400"), 2.0),
    ):
        right = audit_sampled(chosen, sampling, scale, DELTA)
        make = too_small(chosen, scale, 0.5)
        wrong = audit_sampled(chosen, sampling, scale, DELTA, trials=2**15, make_stream=make)
        print(
            f"| {sampling} | {chosen.name} | {right.claim.epsilon:.3f} | {right.lower_bound:.3f} | "
            f"{right.ratio:.1%} | {'detected' if wrong.exceeds_claim else 'not detected'} |",
            flush=True,
        )


def trained(divisor):
    """Train on chitchat with 1,000 canaries and divided noise.

    Returns the audit, whether the run verifies, and the seconds of all processors.
    """
    from dpftrl.simulation.config import read_config
    from dpftrl.simulation.training import Training

    planned = run_store._noise

    def noise(plan, file, layout, key):
        return NoiseStream.unchecked(
            plan.mechanism,
            layout.size,
            noise_multiplier=plan.noise_multiplier / divisor,
            key=key,
            clip_norm=file.settings.grid(plan).clip_norm,
        )

    run_store._noise = planned if divisor == 1 else noise
    try:
        with tempfile.TemporaryDirectory() as place:
            folder, state = Path(place) / "run", Path(place) / "state"
            started = time.process_time()
            config = read_config(None)
            with Training.create(config, folder, canaries=1000, state_folder=state) as training:
                training.run()
            found = audit_run(folder)
            seconds = time.process_time() - started
            return found, verify_run(folder, state).passed, seconds
    finally:
        run_store._noise = planned


def runs() -> None:
    """Train on chitchat with 1,000 canaries, with the planned noise and with a quarter of it."""
    print("\n| noise | correct | claimed mu | general | independent noise | verify | seconds |")
    print("|---|---|---|---|---|---|---|")
    for divisor in (1, 4):
        found, passed, seconds = trained(divisor)
        print(
            f"| divided by {divisor} | {found.guesses.correct:,} of {found.guesses.guesses:,} | "
            f"{found.claim.mu:.3f} | ≥ {found.mu_general:.3f} | ≥ {found.mu_independent:.3f} | "
            f"{'passed' if passed else 'failed'} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    parts = {"mechanisms": mechanisms, "sampled": sampled, "runs": runs}
    for part in sys.argv[1:] or parts:
        parts[part]()
