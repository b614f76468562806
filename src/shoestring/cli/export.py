"""`shoestring export RUN -o model.safetensors`: a run's weights as plain PyTorch has them."""

import argparse
from typing import Any

from .options import command, output_file, print_json, say
from .recorded import add_run, opened

EXAMPLES = (
    "runs/wrn-28-2 -o model.safetensors",
    "runs/wrn-28-2 -o model.safetensors --weights last --dtype stored",
)


def add(subparsers: Any) -> None:
    purpose = "write a run's weights as a plain, dense state_dict"
    parser = command(subparsers, "export", run, purpose, EXAMPLES)
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=output_file(".safetensors"), required=True, metavar="FILE", help="the file to write"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16", "stored"), default="fp32",
        help="of floating tensors: fp32 (default), fp16, bf16, or as they are stored",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from ..runs.export import export
    from ..units import format_bytes

    folder = opened(args.run_folder)
    tensors = export(folder.path, args.output, args.weights, args.dtype, say)
    size = args.output.stat().st_size
    if args.json:
        print_json({"file": str(args.output), "tensors": tensors, "bytes": size, "weights": args.weights})
        return 0
    print(f"wrote {args.output}: {tensors:,} tensors, {format_bytes(size)}, the {args.weights} weights")
    print(f'load it with model.load_state_dict(safetensors.torch.load_file("{args.output}"))')
    return 0
