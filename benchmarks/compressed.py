"""Compressed activations across architectures: saved bytes, peak, time and fidelity of each codec beside plain PyTorch.

    python benchmarks/compressed.py --models wrn-28-2 resnet18-imagenet --steps 3     # one line of JSON per row
    python benchmarks/compressed.py --report docs/compressed.md                       # the rows so far as a table

Saved bytes are those of all that the forward pass saves, by a rehearsal on fake tensors. The peak is the heap's, of
building the model and two steps in a fresh process. Times are medians of steps that take turns in one process; plain
PyTorch is the better of NCHW and channels_last. The cosine is that of the whole gradient with the exact one, averaged
over probed steps of a plain training on the model's own batch. Rows that are there are not made again.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
from lean_steps import builtin, cpu_name, heap, times

import shoestring
from shoestring.errors import NoEffect
from shoestring.fidelity import probe
from shoestring.techniques.activations.rehearsals import saved_bytes
from shoestring.techniques.registry import apply_settings

MODELS = {"wrn-28-2": 100, "resnet18-imagenet": 32, "vit-tiny": 32, "convnext-tiny": 8, "dynamicconv-iwslt": 1000}
CODECS = ("pool2", "pool4", "int4", "int2", "pool8+int2", "int4,*:batch_norm=int4", "int2,*:batch_norm=int4")
PLAIN = ({}, {"pytorch": "channels_last"})


def row(model: str, size: int, codec: str, args: argparse.Namespace) -> dict:
    """Everything about one codec of one model, except its time."""
    task = builtin(model, size)
    lean = apply_settings(task, {"activations": codec})
    found = {
        "saved": saved_bytes(lean) / saved_bytes(task),
        "heap": heap(model, size, {"activations": codec}) / min(heap(model, size, plan) for plan in PLAIN),
    }
    if "," not in codec:
        real = shoestring.builtin(model, **{"tokens" if model.startswith("dynamicconv") else "batch": size})
        told = probe(real, [real.batch] * args.steps, args.steps, [codec], every=2, peak=lambda task: 0)
        found["cosine"] = told.whole[0].cosine
    return found


def ratios(model: str, size: int, codecs: list[str], repeats: int, threads: int) -> dict[str, float]:
    """Seconds of a step with each codec over those of the better plain layout, all interleaved."""
    torch.set_num_threads(threads)
    medians = times(model, size, [*PLAIN, *({"activations": codec} for codec in codecs)], repeats)
    return dict(zip(codecs, (seconds / min(medians[:2]) for seconds in medians[2:]), strict=True))


def measure(args: argparse.Namespace) -> None:
    for model in args.models:
        size, there = MODELS[model], {(r["model"], r["codec"]) for r in records(args.results)}
        wanted = [codec for codec in args.codecs if (model, codec) not in there]
        found = {}
        for codec in list(wanted):
            try:
                found[codec] = row(model, size, codec, args)
            except NoEffect as error:
                print(f"{model}, {codec}: {error}", file=sys.stderr)
                wanted.remove(codec)
        by_threads = {n: ratios(model, size, wanted, args.repeats, n) for n in args.threads} if wanted else {}
        for codec in wanted:
            taken = {f"time, {n} threads": by_threads[n][codec] for n in by_threads}
            line = {"model": model, "batch": size, "codec": codec, **found[codec], **taken, "cpu": cpu_name()}
            with args.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(rows: list[dict]) -> str:
    names = ["saved", "heap", *sorted({name for r in rows for name in r if name.startswith("time")}), "cosine"]
    lines = [f"| model | batch | codec | {' | '.join(names)} |", "|---" * (len(names) + 3) + "|"]
    for r in rows:
        cells = " | ".join(f"{r[name]:.3f}" if name in r else "" for name in names)
        lines.append(f"| {r['model']} | {r['batch']} | `{r['codec']}` | {cells} |")
    cpus = ", ".join(sorted({r["cpu"] for r in rows}))
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    return "\n".join([
        "# Compressed activations across architectures", "", f"All but the cosine are ratios to plain PyTorch. {about}",
        "", f"Where: {cpus}; {datetime.date.today()}. By: `python benchmarks/compressed.py`.", "", *lines, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--steps", type=int, default=5, help="of the training that is probed")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=Path("runs/compressed.jsonl"))
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.report:
        args.report.write_text(report(records(args.results)))
    else:
        measure(args)


if __name__ == "__main__":
    main()
