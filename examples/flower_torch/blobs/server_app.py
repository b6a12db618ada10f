"""The server: what FedAvg was, is DpFtrl with a plan and a folder."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from blobs.task import Net, accuracy
from dpftrl.flower import DpFtrl, Settings, load_plan

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    told = context.run_config
    torch.manual_seed(0)
    strategy = DpFtrl(
        load_plan(told["plan"]),
        Settings(clip_norm=told["clip-norm"]),
        folder=told["folder"],
        require_auth=told["require-auth"],
    )
    strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": told["lr"]}),
        evaluate_fn=evaluate,
    )


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(net)})
