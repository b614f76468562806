"""A transformers model: the batch is a dict, the loss is the one that the model returns.

pip install transformers
python examples/transformers_model.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shoestring


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def main(updates: int = 6) -> list[float]:
    torch.manual_seed(0)
    # From a config: random weights, nothing is downloaded. `from_pretrained` gives the same kind of module.
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(500, (16, 32))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    task = shoestring.Task(model, loss, batch, torch.optim.AdamW(model.parameters(), lr=3e-3), name="GPT-2, small")
    print(shoestring.profile(task))

    # A plan can be written by hand as well as searched for: activation checkpointing around each block,
    # gradient accumulation over microbatches of 8 examples, and Adam's moments in 8 bits.
    plan = shoestring.Plan(checkpoint="residual-1", microbatch=8, optimizer="8bit")
    lean = shoestring.apply(task, plan)
    print(shoestring.profile(lean.task))

    losses = [lean.step(batch).item() for _ in range(updates)]
    print("loss", *(f"{value:.2f}" for value in losses))
    return losses


if __name__ == "__main__":
    main()
