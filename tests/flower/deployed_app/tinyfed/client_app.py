from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dpftrl.flower import client_mod
from tinyfed import task

app = ClientApp(mods=[client_mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    model = message.content["arrays"]["w"].numpy()
    trained = task.train(model, context.node_config["partition-id"])
    arrays = ArrayRecord({"w": Array(trained)})
    metrics = MetricRecord({"num-examples": 7})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
