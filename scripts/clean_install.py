"""Install the wheel in clean environments, and try what each extra is for.

`python scripts/clean_install.py` tries the base alone, and then the light extras together; `--all`
tries every extra alone. Each environment is new and gets the wheel and what it depends on, without
development packages; a short program uses the extra. PyTorch is pinned, so that a CPU build can be
installed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ("torch==2.13.0", "opacus==1.6.0")
ACCOUNT = (
    "dpftrl account blt-b400 --rounds 100 --min-sep 20 --noise-multiplier 5 --delta 1e-5 --json"
)
DATA = "import numpy as np; x = np.zeros((8, 2), np.float32); y = np.zeros(8, np.int64)"
TORCH = """
import torch
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 2)
data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
OPTIONS = "folder=None, epsilon=8.0, delta=1e-2, epochs=1, batch_size=4, clip_norm=1.0"
SIMULATE = """
import numpy as np, dpftrl
people = {f"client-{i}": np.full(2, float(i)) for i in range(60)}
plan = dpftrl.make_plan(population=60, report_goal=10, rounds=4, epsilon=8.0, delta=1e-3)
result = dpftrl.simulate(
    "own", plan, model={"w": np.zeros(2)}, train=lambda model, data: {"w": model["w"] + data},
    clients=people, clip_norm=1.0,
)
print(result.epsilon)
"""
LOG = "printf 'client,round\\na,0\\nb,1\\na,3\\n' > log.csv && "
# For each extra, a shell command that needs it.
TRIALS = {
    "": f"dpftrl --version && {ACCOUNT} && dpftrl plan --population 1M --report-goal 1000 --rounds "
    f"100 --epsilon 4 --delta 1e-7 --json && python -c '{SIMULATE}' && dpftrl verify own && "
    "dpftrl statement own",
    "audit": f"{ACCOUNT} --rigorous",
    "dp-accounting": "dpftrl account independent --dataset 1000 --batch-size 10 --epochs 1 "
    "--sampling poisson --noise-multiplier 2 --delta 1e-5 --json",
    "flower": "python -c 'from dpftrl.flower import DpFtrl, client_mod'",
    "jax": f"""python -W ignore -c '
{DATA}
import dpftrl.jax as dj, optax
loss = lambda params, batch: ((batch[0] @ params["w"]) ** 2).mean()
private = dj.make_private(loss, dict(w=np.ones(2, np.float32)), optax.sgd(0.1), (x, y), {OPTIONS})
for batch in private.loader:
    private.step(batch)
print(private.epsilon)'""",
    "logs": f"{LOG}dpftrl observe log.csv --json",
    "metrics": "python -c 'import dpftrl.status, prometheus_client'",
    "plot": "dpftrl show blt-b400 --rounds 100 --plot blt.png && test -s blt.png",
    "web": "dpftrl web --help && python -c 'import dpftrl.web'",
    "torch": f"""python -W ignore -c '{TORCH}
import dpftrl.torch as dt
private = dt.make_private(model, optimizer, data, {OPTIONS})
for batch in private.loader:
    private.step(lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]), batch)
print(private.epsilon)'""",
    "opacus": "python -W ignore -c 'from dpftrl.torch.opacus import DPFTRLOptimizer'",
    "train": "dpftrl train --set privacy.rounds=2 --set privacy.report_goal=20 --out run && "
    "dpftrl verify run",
}
LIGHT = ("", "audit,dp-accounting,logs,metrics,plot,web")


def built(folder: Path) -> Path:
    """Build the wheel."""
    code = "from hatchling.builders.wheel import WheelBuilder as W; import sys; "
    code += "print(*W(sys.argv[1]).build(directory=sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(folder)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return Path(done.stdout.strip().splitlines()[-1])


def size_of(folder: Path) -> float:
    """Megabytes of the files in a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def import_time(python: Path) -> float:
    """Return the time of `import dpftrl`, as a multiple of the time in which Python starts."""

    def fastest(code: str) -> float:
        times = list[float]()
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([python, "-c", code], check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    empty = fastest("pass")
    return (fastest("import dpftrl") - empty) / empty


def tried(wheel: Path, extras: str, folder: Path) -> None:
    """Install into a new environment, and run the trials.

    Raises:
        subprocess.CalledProcessError: The installation or the trial failed.
    """
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    (folder / "pins.txt").write_text("\n".join(PINS) + "\n")
    programs = folder / "env" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = f"dpftrl[{extras}] @ {wheel.as_uri()}" if extras else str(wheel)
    subprocess.run([*pip, "--constraint", folder / "pins.txt", target], check=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["DPFTRL_STATE"] = str(folder / "state")
    variables["PATH"] = f"{programs}{os.pathsep}{variables['PATH']}"
    for extra in extras.split(","):
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", TRIALS[extra]],
            check=True, cwd=folder, env=variables, stdout=subprocess.DEVNULL,
        )  # fmt: skip


def main() -> None:
    """Try the extras that were asked for."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = "Extras to try, with commas between those of one environment; '' is the base."
    parser.add_argument("extras", nargs="*", help=f"{about} Default: the base and the light ones.")
    parser.add_argument("--all", action="store_true", help="Try every extra, each alone.")
    options = parser.parse_args()
    extras = list(TRIALS) if options.all else options.extras or list(LIGHT)
    unknown = {one for each in extras for one in each.split(",")} - set(TRIALS)
    if unknown:
        parser.error(f"unknown extras: {', '.join(sorted(unknown))}")
    failed = list[str]()
    with tempfile.TemporaryDirectory() as root:
        wheel = built(Path(root))
        for extra in extras:
            start, name = time.monotonic(), extra or "base"
            with tempfile.TemporaryDirectory(dir=root) as folder:
                try:
                    tried(wheel, extra, Path(folder))
                except subprocess.CalledProcessError as error:
                    failed.append(name)
                    print(f"{name}: FAILED with code {error.returncode}", flush=True)
                    continue
                size = size_of(Path(folder) / "env")
                print(f"{name}: ok, {size:,.0f} MB, {time.monotonic() - start:.0f} s", flush=True)
                if not extra:
                    ratio = import_time(Path(folder) / "env" / "bin" / "python")
                    print(f"import dpftrl: {ratio:.2f} times the start of Python", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
