"""The privacy columns of table `gboard`, and the guarantees of the launched models."""

from dataclasses import dataclass
from typing import final

from dpftrl import Mechanism, MinSep, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.accounting import Run, epsilon_of
from dpftrl.paper.item import Claim, Findings, Item, Row, bandmf, printed, rounds_to

DELTA = 1e-10


@final
@dataclass(frozen=True)
class Printed:
    """One row of the table as printed.

    Attributes:
        model: The language of the model.
        mechanism: The mechanism.
        rounds: Rounds of training.
        between: Rounds between two participations of a client, which is min-sep - 1.
        cap: Largest number of participations of a client.
        noise_multiplier: The noise multiplier, which the paper calls sigma.
        rho: The printed zCDP guarantee.
        epsilon: The printed epsilon.
    """

    model: str
    mechanism: str
    rounds: int
    between: int
    cap: int
    noise_multiplier: float
    rho: str
    epsilon: str


TABLE = (
    Printed("es-ES", "BandMF-400", 1280, 296, 4, 1.411, "0.29", "4.82"),
    Printed("es-ES", "blt-b400", 1280, 300, 4, 7.379, "0.16", "3.46"),
    Printed("id-ID", "tree", 2350, 437, 5, 7, "0.94", "9.29"),
    Printed("id-ID", "blt-b400", 2350, 447, 5, 7.379, "0.20", "3.93"),
    Printed("pt-BR", "BandMF-1000", 2000, 2001, 1, 4.523, "0.0245", "1.32"),
    Printed("pt-BR", "blt-b1000", 2000, 2001, 1, 8.681, "0.0223", "1.25"),
    Printed("pt-BR", "blt-b1000", 2000, 1181, 2, 16.1, "0.0140", "0.98"),
    Printed("pt-PT", "tree", 430, 91, 4, 7, "1.33", "11.27"),
    Printed("pt-PT", "blt-b100", 430, 92, 4, 3.12, "1.11", "10.19"),
    Printed("pt-PT", "blt-b100", 320, 49, 6, 5.5, "0.75", "8.19"),
)
REASONS = {
    ("es-ES", "BandMF-400"): "the matrix was made for a learning-rate cool-down, its scale and "
    "entries are not given; with columns of norm 1 four participations alone give more",
    ("pt-PT", "tree"): "the worst pattern has sensitivity squared 43, and rho is 43 / (2 x 49)",
}
# Model, rho and epsilon of the launched models, and of those that they replaced.
LAUNCHES = (
    ("pt-BR", "0.022", "1.234"),
    ("pt-PT", "0.749", "8.19"),
    ("pt-PT before", "0.99", "9.56"),
    ("es-ES", "0.202", "4"),
    ("es-ES before", "0.89", "9.01"),
    ("id-ID", "0.099", "2.74"),
    ("English", "0.29", "4.84"),
    ("Spanish, Argentina", "0.392", "5.73"),
    ("Spanish, Mexico", "1.39", "11.58"),
    ("Spanish, Latin America", "0.54", "6.84"),
)


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds for which BandMF is optimized; for 2,000 rounds its bands are those of the paper."""

    bandmf_rounds: int


def table(sizes: Sizes, on_progress: Progress) -> Findings:
    """Rho and epsilon of every row, from its noise multiplier, rounds, min-sep and cap."""
    rows: list[Row] = []
    claims: list[Claim] = []
    for row in TABLE:
        on_progress(None, f"{row.model} {row.mechanism}")
        computed = _compute(row, sizes)
        if computed is not None:
            rows.append(computed)
            claims += _claims(row, computed)
    return Findings(rows, [*claims, *_other_reading(sizes)])


def claims_of_row(row: Printed, sizes: Sizes, on_progress: Progress) -> list[Claim]:
    """The claims about rho and epsilon of one row.

    Args:
        row: The row.
        sizes: The full sizes: at reduced ones, BandMF cannot run for so many rounds.
        on_progress: Called before the row is computed.
    """
    on_progress(None, f"{row.model} {row.mechanism}")
    computed = _compute(row, sizes)
    assert computed is not None
    return _claims(row, computed)


def _compute(row: Printed, sizes: Sizes) -> Row | None:
    """Our rho and epsilon of a row, beside the printed ones."""
    built = _mechanism(row.mechanism, sizes)
    if built.rounds is not None and built.rounds < row.rounds:
        return None  # a BandMF matrix of reduced size cannot run for so many rounds
    clients = MinSep.from_rounds_between(row.rounds, row.between, row.cap)
    rho, epsilon = _ideal(built, clients, row.noise_multiplier)
    return {
        "model": row.model,
        "mechanism": row.mechanism,
        "noise_multiplier": row.noise_multiplier,
        "rho": rho,
        "printed_rho": row.rho,
        "epsilon": epsilon,
        "printed_epsilon": row.epsilon,
    }


def _claims(row: Printed, computed: Row) -> list[Claim]:
    """The claims that rho and epsilon are as printed."""
    because = REASONS.get((row.model, row.mechanism), "")
    label = f"{row.model}, {row.mechanism}, noise multiplier {row.noise_multiplier:g}"
    rho, epsilon = float(computed["rho"] or 0), float(computed["epsilon"] or 0)
    return [
        _strict(printed(f"{label}: rho", row.rho, rho, because, up=True)),
        _strict(printed(f"{label}: epsilon", row.epsilon, epsilon, because, up=True)),
    ]


def _other_reading(sizes: Sizes) -> list[Claim]:
    """The claim about BandMF for es-ES, if its matrix is scaled to sensitivity 1.

    The sensitivity is that for the participation for which the matrix was optimized.
    """
    row, n = TABLE[0], sizes.bandmf_rounds
    if n < row.rounds:
        return []
    bands = _mechanism(row.mechanism, sizes)
    scale = bands.sensitivity(MinSep(n, n // 5)).value
    clients = MinSep.from_rounds_between(row.rounds, row.between, row.cap)
    rho, _ = _ideal(bands, clients, row.noise_multiplier * scale)
    text = f"{row.model}, {row.mechanism}, read as scaled to sensitivity 1 where it was made: rho"
    because = "nearer, with our matrix for the prefix sum instead of theirs for a cool-down"
    return [_strict(printed(text, row.rho, rho, because, up=True))]


def _ideal(mechanism: Mechanism, clients: MinSep, noise_multiplier: float) -> tuple[float, float]:
    """Rho and epsilon as in the paper, which does not cover rounding in the noise buffers."""
    mu = Run.of(mechanism, clients, noise_multiplier).ideal_mu
    return mu * mu / 2, epsilon_of(DELTA, mu)


def _strict(claim: Claim) -> Claim:
    """The claim with the verdict `does not` instead of `better`.

    A guarantee that is smaller than printed is not better: it is a different number.
    """
    if claim.verdict != "better":
        return claim
    return Claim(claim.text, claim.paper, claim.ours, "does not", claim.because)


def _mechanism(name: str, sizes: Sizes) -> Mechanism:
    """The mechanism of a row; the bands of BandMF are scaled with its rounds."""
    family, _, bands = name.partition("-")
    if family != "BandMF":
        return mechanism(name)
    return bandmf(sizes.bandmf_rounds, int(bands) * sizes.bandmf_rounds // 2000)


def launches(sizes: None, on_progress: Progress) -> Findings:
    """Whether each pair of printed rho and epsilon can belong to one Gaussian mechanism.

    A printed rho stands for the interval of numbers that round to it, to the nearest or up. The
    interval of their epsilons must contain a number that rounds to the printed epsilon.
    """
    del sizes
    rows: list[Row] = []
    claims: list[Claim] = []
    for model, rho, epsilon in LAUNCHES:
        on_progress(None, model)
        ours = _epsilon(float(rho))
        unit = 10.0 ** -len(rho.partition(".")[2])
        low, high = _epsilon(float(rho) - unit), _epsilon(float(rho) + unit / 2)
        place = 10.0 ** -len(epsilon.partition(".")[2])
        fits = low <= float(epsilon) + place / 2 and high >= float(epsilon) - place
        rows.append(
            {
                "model": model,
                "printed_rho": rho,
                "printed_epsilon": epsilon,
                "epsilon_of_rho": ours,
                "least_epsilon": low,
                "most_epsilon": high,
            }
        )
        exact = rounds_to(ours, epsilon) or rounds_to(ours, epsilon, up=True)
        because = "" if exact else f"rho is rounded: {low:.3f} to {high:.3f} are possible"
        verdict = "reproduces" if fits else "does not"
        text = f"{model}: epsilon for rho {rho}, at delta {DELTA:g}"
        claims.append(Claim(text, epsilon, ours, verdict, because))
    return Findings(rows, claims)


def _epsilon(rho: float) -> float:
    """Epsilon at `DELTA` of the Gaussian mechanism with this rho."""
    return epsilon_of(DELTA, (2 * rho) ** 0.5)


GBOARD = Item(
    "tab-gboard-privacy",
    "Privacy of the production models",
    Sizes(2000),
    Sizes(40),
    table,
)
LAUNCHED = Item(
    "launches", "Guarantees of the launched models, rho against epsilon", None, None, launches
)
