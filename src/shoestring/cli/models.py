"""`shoestring models`: the models that are built in."""

import argparse
from typing import Any

from .options import command, print_json


def add(subparsers: Any) -> None:
    command(subparsers, "models", run, "list the models that are built in", ("", "--json"))


def run(args: argparse.Namespace) -> int:
    from ..models.tasks import CATALOGUE, builtin

    rows: list[dict[str, Any]] = []
    for name, (about, size) in CATALOGUE.items():
        task = builtin(name, device="meta", **{size: 1 if size == "batch" else 100})
        parameters = sum(parameter.numel() for parameter in task.model.parameters())
        rows.append(
            {
                "name": name,
                "about": about,
                "size": size,
                "parameters": parameters,
                "trained_by": type(task.optimizer).__name__,
            }
        )
    if args.json:
        print_json(rows)
        return 0
    print(f"{'MODEL':<18} {'parameters':>10}  {'trained by':<10}  size of a batch  what it is")
    for row in rows:
        millions = f"{row['parameters'] / 1e6:.2f} M"
        print(f"{row['name']:<18} {millions:>10}  {row['trained_by']:<10}  --{row['size'] + ' N':<13}  {row['about']}")
    print(
        "WideResNets of any depth and width are built in as wrn-DEPTH-WIDTH, with a depth of 6n + 4, such as wrn-10-1."
    )
    print("Your own: file.py:function or package.module:function that returns a shoestring.Task.")
    return 0
