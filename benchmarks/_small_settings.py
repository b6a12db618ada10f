"""The settings of trainings whose figures were measured before the defaults of `dpftrl train` grew.

With these lists `read_config` gives the same settings again, so that the figures can be repeated.
"""

SMALL_MODEL = [
    'model={name="window",sizes={embedding=16,words=3,hidden=16}}',
    "client={epochs=1,batch_size=16,learning_rate=1.0}",
    'server={name="sgd",learning_rate=1.0,momentum=0.9,nesterov=false,schedule="constant"}',
    "data.vocabulary_size=1000",
]
CHITCHAT = [
    *SMALL_MODEL,
    "clip_norm=0.5",
    "evaluate_every=5",
    "model.pretraining_steps=0",
    "privacy={rounds=60,report_goal=100,epsilon=8.0,delta=1e-4}",
]
POETRY = [
    'task="poetry"',
    *SMALL_MODEL,
    "clip_norm=0.3",
    "evaluate_every=20",
    "model.pretraining_steps=2000",
    "model.pretraining_rate=5e-3",
    "model.pretraining_cooldown=false",
    "privacy={rounds=300,report_goal=100,availability=0.95,epsilon=8.0,delta=1e-5}",
]
