"""The privacy columns of the paper's production table, recomputed with `dpftrl account`.

Conventions of that table: it counts the rounds between two participations, which is min-sep minus
one; the noise multiplier (sigma in the paper) is not divided by the sensitivity; rho and epsilon
are rounded up, and do not include rounding in the noise buffers, which `dpftrl account` adds. Two
rows differ from the paper, and the output says why.
"""

import json
import subprocess
import sys
from decimal import ROUND_CEILING, Decimal

from dpftrl.accounting import epsilon_of

DELTA = "1e-10"
# Model, mechanism, rounds, rounds between two participations, participations, noise multiplier, and
# rho and epsilon as the paper prints them.
ROWS = (
    ("es-ES", "banded:400", 1280, 296, 4, 1.411, "0.29", "4.82"),
    ("es-ES", "blt-b400", 1280, 300, 4, 7.379, "0.16", "3.46"),
    ("id-ID", "tree", 2350, 437, 5, 7, "0.94", "9.29"),
    ("id-ID", "blt-b400", 2350, 447, 5, 7.379, "0.20", "3.93"),
    ("pt-BR", "banded:1000", 2000, 2001, 1, 4.523, "0.0245", "1.32"),
    ("pt-BR", "blt-b1000", 2000, 2001, 1, 8.681, "0.0223", "1.25"),
    ("pt-BR", "blt-b1000", 2000, 1181, 2, 16.1, "0.0140", "0.98"),
    ("pt-PT", "tree", 430, 91, 4, 7, "1.33", "11.27"),
    ("pt-PT", "blt-b100", 430, 92, 4, 3.12, "1.11", "10.19"),
    ("pt-PT", "blt-b100", 320, 49, 6, 5.5, "0.75", "8.19"),
)
REASONS = {
    (
        "es-ES",
        "banded:400",
    ): "its matrix was optimized for a learning-rate cool-down, and is not published",
    ("pt-PT", "tree"): "the exact sensitivity squared is 43, so rho is 43 / (2 x 49)",
}


def main() -> None:
    header = (
        "model",
        "mechanism",
        "noise multiplier",
        "rho",
        "printed rho",
        "epsilon",
        "printed epsilon",
        "verdict",
    )
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for model, mechanism, rounds, between, cap, noise_multiplier, rho, epsilon in ROWS:
        guarantee = account(mechanism, rounds, between, cap, noise_multiplier)
        agrees = [
            rounded_up(guarantee[name], printed) == Decimal(printed)
            for name, printed in (("rho", rho), ("epsilon", epsilon))
        ]
        reason = REASONS.get((model, mechanism), "?")
        verdict = "reproduces" if all(agrees) else f"differs: {reason}"
        numbers = (f"{guarantee['rho']:.5g}", rho, f"{guarantee['epsilon']:.4f}", epsilon)
        print(
            "| " + " | ".join((model, mechanism, f"{noise_multiplier:g}", *numbers, verdict)) + " |"
        )


def account(
    mechanism: str, rounds: int, between: int, cap: int, noise_multiplier: float
) -> dict[str, float]:
    """Run `dpftrl account`; return rho and epsilon without rounding in the noise buffers."""
    command = [sys.executable, "-m", "dpftrl", "account", mechanism, "--rounds", str(rounds)]
    command += ["--rounds-between", str(between), "--max-participations", str(cap)]
    command += ["--noise-multiplier", str(noise_multiplier), "--delta", DELTA, "--json"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    mu = answer["sensitivity"] / noise_multiplier
    return {"rho": mu**2 / 2, "epsilon": epsilon_of(float(DELTA), mu)}


def rounded_up(value: float, printed: str) -> Decimal:
    """Round a value up to as many decimals as the paper printed."""
    return Decimal(value).quantize(Decimal(printed), ROUND_CEILING)


if __name__ == "__main__":
    main()
