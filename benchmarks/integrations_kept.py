"""Budgets of Hugging Face's Trainer and of Lightning against the heap meter: is every one kept?

    python benchmarks/integrations_kept.py --write docs/integrations/budgets_kept.md   # fails where one was broken
    python benchmarks/integrations_kept.py --model vit --share 0.5
    python benchmarks/integrations_kept.py --store kept.jsonl   # goes on where it, or another process, has stopped

A budget is a share of what the host's training takes on the heap under an empty plan. Each case is a fresh process: a
warm-up plans and trains, and then the same plan is trained again under the meter, from building the model to the end of
four updates of two batches each, host and all. Planning itself, before, is not in the figure.
"""

import argparse
import contextlib
import datetime
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lean_steps import cpu_name
from torch import nn

import shoestring
from shoestring.measuring import measure_heap
from shoestring.units import format_bytes

UPDATES, BATCHES = 4, 2
SHARES = (0.9, 0.7, 0.5, 0.35)
_plans: dict[str, shoestring.Plan] = {}  # of the warm-up, in the process that measures
_data: dict[str, list[Any]] = {}


# -- the models -------------------------------------------------------------------------------------------------------
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=0, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convolutions() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64), block(64, 64), *head)


def sentences(count: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.randint(1000, (count, length))]


def labelled(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": x, "labels": torch.tensor(n % 10)} for n, x in enumerate(torch.randn(count, 3, 64, 64))]


def points(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.tensor(n % 10)) for n, x in enumerate(torch.randn(count, 256))]


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.tensor(n % 10)) for n, x in enumerate(torch.randn(count, 3, 32, 32))]


# name -> host, model, examples, batch size
MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[int], list], int]] = {
    "gpt2": ("Hugging Face", gpt2, sentences, 16),
    "llama": ("Hugging Face", llama, sentences, 16),
    "vit": ("Hugging Face", vit, labelled, 16),
    "perceptron": ("Lightning", perceptron, points, 1024),
    "convolutions": ("Lightning", convolutions, images, 32),
}


# -- training, in the process that measures ---------------------------------------------------------------------------
def train(name: str, budget: int | None, told: str) -> Any:
    """Builds a model and trains it by its host; what the heap meter measures."""
    host, build, examples, size = MODELS[name]
    if name not in _data:  # the warm-up's: data are not the training's memory
        _data[name] = examples(UPDATES * BATCHES * size)
    data = _data[name]
    how = {"plan": _plans[name]} if name in _plans else {"plan": shoestring.Plan()} if budget is None else {}
    torch.manual_seed(0)
    run = _huggingface if host == "Hugging Face" else _lightning
    with contextlib.redirect_stdout(io.StringIO()):
        guest = run(build(), data, size, {"budget": budget, **how})
    _plans[name] = guest.lean.plan
    plan = ", ".join(f"{word} {value}" for word, value in guest.lean.plan.techniques().items()) or "no technique"
    Path(told).write_text(json.dumps({"plan": plan, **guest.metrics()}))


def _huggingface(model: nn.Module, data: list, size: int, how: dict[str, Any]) -> Any:
    from transformers import TrainingArguments

    from shoestring.integrations.huggingface import LeanTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=size, gradient_accumulation_steps=BATCHES,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = LeanTrainer(model, args, train_dataset=data, **how)
        trainer.train()
        return trainer.guest


def _lightning(model: nn.Module, data: list, size: int, how: dict[str, Any]) -> Any:
    import lightning.pytorch as pl

    from shoestring.integrations.lightning import Shoestring

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = Shoestring(**how)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], accumulate_grad_batches=BATCHES, **off)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=size))
    return callback.guest


# -- the table --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A model under a budget, and what it took, in bytes; no budget: plain training."""

    host: str
    model: str
    budget: int | None
    plan: str
    predicted: int
    heap: int

    @property
    def kept(self) -> bool:
        return self.budget is None or self.heap <= self.budget


def measured(name: str, budget: int | None, store: Path | None = None) -> Case:
    known = [Case(**json.loads(line)) for line in store.read_text().splitlines()] if store and store.exists() else []
    for case in known:
        if (case.model, case.budget) == (name, budget):
            return case
    case = _measured(name, budget)
    if store:
        with store.open("a") as file:
            file.write(json.dumps(asdict(case)) + "\n")
    return case


def _measured(name: str, budget: int | None) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        heap = measure_heap(f"{__file__}:train", [name, budget, str(told)]).peak_bytes
        found = json.loads(told.read_text())
    return Case(MODELS[name][0], name, budget, found["plan"], found["mem/predicted_bytes"], heap)


def cases(name: str, shares: list[float], store: Path | None) -> Iterator[Case]:
    plain = measured(name, None, store)
    print(plain, file=sys.stderr, flush=True)
    for share in shares:
        try:
            case = measured(name, round(share * plain.heap), store)
        except shoestring.ShoestringError as error:  # nothing fits: no budget to keep
            print(f"{name}, {share:.0%}: {error}", file=sys.stderr, flush=True)
            continue
        print(case, file=sys.stderr, flush=True)
        yield case


def report(found: list[Case]) -> str:
    rows = [
        f"| {c.host} | {c.model} | {format_bytes(c.budget or 0)} | {c.plan} | {format_bytes(c.predicted)} | "
        f"{format_bytes(c.heap)} | {'yes' if c.kept else 'NO'} |"
        for c in found
    ]
    kept = sum(case.kept for case in found)
    return f"""# Budgets of integrations, kept on the heap: {kept} of {len(found)}
{" ".join(__doc__.splitlines()[6:]).strip()} Batches of an update that were fetched ahead are in
it. Where: {cpu_name()}; torch {torch.__version__}; {datetime.date.today()}. By:
`{" ".join(["python", "benchmarks/integrations_kept.py", *sys.argv[1:]])}`

| host | model | budget | plan | predicted tensors | heap | kept |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--share", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--store", type=Path, help="a file of the cases that were measured")
    parser.add_argument("--write", type=Path, help="a file for the table")
    args = parser.parse_args()
    found = [case for name in args.model for case in cases(name, args.share, args.store)]
    text = report(found)
    print(text)
    if args.write:
        args.write.write_text(text)
    if broken := [case for case in found if not case.kept]:
        sys.exit(f"{len(broken)} budgets were broken")


if __name__ == "__main__":
    main()
