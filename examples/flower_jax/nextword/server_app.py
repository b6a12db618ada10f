"""The server: a plan, a folder, and a model to start from."""

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from dpftrl.federated import Settings, Sgd
from dpftrl.flower import DpFtrl
from dpftrl.plan import load_plan
from nextword import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = context.run_config
    train(
        grid,
        told["plan"],
        told["folder"],
        Settings(clip_norm=told["clip-norm"], optimizer=Sgd(told["server-rate"])),
        require_auth=told["require-auth"],
    )


def train(grid: Grid, plan: str, folder: str, settings: Settings, *, require_auth: bool) -> None:
    model = ArrayRecord({name: Array(array) for name, array in task.start().items()})
    DpFtrl(load_plan(plan), settings, folder, require_auth=require_auth).start(
        grid, model, evaluate_fn=evaluate
    )


def evaluate(rounds: int, arrays: ArrayRecord) -> MetricRecord | None:
    if rounds % 5:
        return None
    model = {name: array.numpy() for name, array in arrays.items()}
    return MetricRecord({"accuracy": task.accuracy(model)})
