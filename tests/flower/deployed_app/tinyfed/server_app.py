import json
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Settings
from dpftrl.flower import DpFtrl, Patience
from dpftrl.plan import Fleet, Plan
from tinyfed import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    place = Path(str(config["folder"]))
    limits = MinSep(int(config["rounds"]), int(config["min-sep"]))
    fleet = Fleet(
        population=int(config["nodes"]),
        report_goal=int(config["goal"]),
        over_selection=float(config["over-selection"]),
    )
    plan = Plan(fleet, account(mechanism("blt-b400"), limits, noise_multiplier=0.05, delta=1e-6))

    def evaluate(rounds: int, arrays: ArrayRecord) -> MetricRecord:
        loss = task.loss(arrays["w"].numpy())
        with (place / "losses.jsonl").open("a") as file:
            file.write(json.dumps([rounds, loss]) + "\n")
        return MetricRecord({"loss": loss})

    DpFtrl(
        plan,
        Settings(clip_norm=2.0),
        place / "run",
        require_auth=bool(config["require-auth"]),
        patience=Patience(
            replies=float(config["reply-seconds"]), nodes=120, lock=float(config["lock-seconds"])
        ),
        close_empty_rounds=bool(config["close-empty-rounds"]),
        state_folder=place / "state",
        insecure_test_key=1,
    ).start(grid, ArrayRecord({"w": Array(task.start())}), evaluate_fn=evaluate)
