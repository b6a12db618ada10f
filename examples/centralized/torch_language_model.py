"""Private fine-tuning of a causal language model of Hugging Face, with LoRA written by hand.

The model has random weights here: put `from_pretrained` in its place.
"""

import sys
import tempfile

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import dpftrl.torch as dt

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
TARGET = {"epsilon": 8.0, "delta": 1e-4, "epochs": EPOCHS, "clip_norm": 0.5}
TEXT = "privacy is not secrecy but the power to choose what to reveal to whom and when . " * 64


class LoRA(nn.Module):
    """A frozen layer plus a product of two thin matrices."""

    def __init__(self, layer: nn.Module, rank: int = 4):
        super().__init__()
        self.layer = layer
        inputs, outputs = layer.weight.shape  # Hugging Face's Conv1D is transposed
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def main(folder: str) -> None:
    torch.manual_seed(0)
    vocabulary = sorted(set(TEXT.split()))
    words = torch.tensor([vocabulary.index(word) for word in TEXT.split()])
    examples = [{"input_ids": words[i : i + 16]} for i in range(0, len(words) - 16, 8)]

    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), **sizes)).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    private = dt.make_private(
        model, optimizer, examples, folder=f"{folder}/run", batch_size=16, sampling="none", **TARGET
    )
    for batch in private.loader:
        private.step(loss_fn, batch)
    model.save_pretrained(f"{folder}/model")  # still an ordinary model
    print(f"{private.run.settings.size:,} trained parameters, epsilon {private.epsilon:g}")


if __name__ == "__main__":
    main(tempfile.mkdtemp())
