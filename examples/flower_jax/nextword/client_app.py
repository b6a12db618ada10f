"""A device: it trains on the sentences of one person."""

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from dpftrl.flower import client_mod
from nextword import task


def client_app(simulated: bool = False) -> ClientApp:
    app = ClientApp(mods=[client_mod(simulated=simulated)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        person = context.node_config["partition-id"]
        trained = task.train(model, person, message.content["config"]["server-round"])
        arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    return app


app = client_app()
