"""Hugging Face's Trainer inside a memory budget: a LeanTrainer, and a `budget`.

pip install transformers accelerate
python examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from shoestring.integrations.huggingface import LeanTrainer


def sentences(count: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Numbers that count up from a random one, modulo 50: easy to learn."""
    starts = torch.randint(50, (count, 1))
    ids = (starts + torch.arange(length)) % 50
    return [{"input_ids": row, "labels": row} for row in ids]


def main(budget: str = "5MB", steps: int = 12) -> list[dict[str, float]]:
    torch.manual_seed(0)
    # From a config: random weights, nothing is downloaded. `from_pretrained` gives the same kind of module.
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=1e-2,
            weight_decay=0.1, warmup_steps=3, logging_steps=1, save_steps=steps, report_to=[], use_cpu=True,
        )  # fmt: skip
        trainer = LeanTrainer(GPT2LMHeadModel(config), args, train_dataset=sentences(), budget=budget)
        trainer.train()
        print(trainer.guest.describe())
        GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-{steps}")  # a plain checkpoint
    return [line for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
