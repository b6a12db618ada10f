"""A device, as Flower's tutorials write it; the mod is all that is new."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from blobs.task import Net, load_data, train
from dpftrl.flower import client_mod

app = ClientApp(mods=[client_mod()])
simulated = ClientApp(mods=[client_mod(simulated=True)])


@app.train()
@simulated.train()
def train_here(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = load_data(context.node_config["partition-id"])
    loss = train(net, data, message.content["config"]["lr"])

    arrays = ArrayRecord(net.state_dict())
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[0])})  # never leave
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
