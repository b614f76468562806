"""Compressed activations across architectures: saved bytes, peak, fidelity and time of codecs and of mixes of them.

    python benchmarks/compressed.py --data DIR --measure saved heap cosine --models resnet18-imagenet
    python benchmarks/compressed.py --measure time --threads 1 2     # on a quiet machine
    python benchmarks/compressed.py --report                         # docs/compressed.md, and the card's section

`saved`: bytes of all that the forward pass saves, by a rehearsal on fake tensors, over plain training's. `heap`: peak
of building the model and two steps in a fresh process, over plain PyTorch's, the better of NCHW and channels_last.
`cosine`: of the whole gradient with the exact one, mean over probed batches of real data after some plain updates
(images are CIFAR-10's, enlarged to the model's size; sentences Multi30k's). `time`: medians of steps that take turns,
over the better plain layout. What is in the results file is not measured again. `adaptive/8` has an eighth of plain
training's saved bytes, `adaptive=int4` those of the rules after the sign; it measures its errors on the batch before
the probes.
"""

import argparse
import datetime
import json
import os
from functools import cache
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lean_steps import builtin, cpu_name, heap, times

import shoestring
from shoestring.data.cifar import MEAN, STD, open_binary
from shoestring.errors import NoEffect, ShoestringError
from shoestring.step import Stepper
from shoestring.studies.data import find_data
from shoestring.studies.sessions import session
from shoestring.task import Task
from shoestring.techniques.activations.adaptive import Adaptive
from shoestring.techniques.activations.gradients import Overlap, gradients, total, untouched
from shoestring.techniques.activations.rehearsals import saved_bytes
from shoestring.techniques.registry import apply_settings


class Model(NamedTuple):
    """The size of the step whose bytes and time are measured, that of the batches whose gradients are, and mixes."""

    size: int
    probed: int
    mixes: tuple[str, ...]


UNIFORM = ("int8", "int4", "int2", "pool2", "pool4", "pool8+int2")  # of the inputs of layers
NORMS = ("int4,*:batch_norm=int4", "pool2,*:batch_norm=int4", "int2,*:batch_norm=int4", "int2,*:batch_norm=int2")
STEM = "norm:batch_norm=int2,*:batch_norm=int4,int2"
TOKENS = ("int4,*:gelu=int4,*:layer_norm=int4", "int2,*:gelu=int4,*:layer_norm=int4")
ATTENTION = "int4,*:gelu=int4,*:layer_norm=int4,*:scaled_dot_product_attention=int4"
ADAPTIVE = ("adaptive/4", "adaptive/8")
BESIDE = ("adaptive=int4,*:batch_norm=int4", "adaptive=int2,*:batch_norm=int2")
MODELS = {
    "resnet18-imagenet": Model(32, 16, (*NORMS, STEM, *ADAPTIVE, "adaptive/10", *BESIDE)),
    "wrn-28-2": Model(100, 32, (*NORMS, *ADAPTIVE, *BESIDE)),
    "vit-tiny": Model(32, 32, (*TOKENS, ATTENTION, *ADAPTIVE)),
    "convnext-tiny": Model(8, 8, (*TOKENS, *ADAPTIVE)),
    "dynamicconv-iwslt": Model(1000, 1000, ADAPTIVE),
}
BESIDE_WORDS = "1 - cosine² of `adaptive` and of the best uniform rules of at most as many bytes"
PLAIN = ({}, {"pytorch": "channels_last"})
AT_ONCE = 6  # rules whose steps take turns with plain training's, each in a process that keeps its memory
WHAT = ("saved", "heap", "cosine", "time")
ROWS = Path(__file__).parent.parent / "docs" / "compressed.json"
CARD = ROWS.parent / "techniques" / "activations.md"
BEGIN, END = "<!-- begin: benchmarks/compressed.py -->", "<!-- end: benchmarks/compressed.py -->"


# -- measuring ----------------------------------------------------------------------------------------------------
def sized(rules: str, task: Task) -> str:
    """adaptive=int4 -> adaptive-SIZE, of as many bytes."""
    if rules.startswith("adaptive="):
        beside = apply_settings(task, {"activations": rules.partition("=")[2]})
        return f"adaptive-{saved_bytes(beside)}B"
    return rules


def saved(model: str, rules: str) -> float:
    task = builtin(model, MODELS[model].size)
    return saved_bytes(apply_settings(task, {"activations": sized(rules, task)})) / saved_bytes(task)


@cache
def plain_heap(model: str) -> int:
    return min(heap(model, MODELS[model].size, plan) for plan in PLAIN)


def heap_share(model: str, rules: str) -> float:
    size = MODELS[model].size
    return heap(model, size, {"activations": sized(rules, builtin(model, size))}) / plain_heap(model)


def probed_task(model: str, root: str, count: int) -> tuple[Task, list[Any]]:
    """A task of real weights and so many batches of real data."""
    size = MODELS[model].probed
    if model.startswith("dynamicconv"):
        job = {"model": model, "sizes": {"tokens": size}, "settings": {}, "held_out": False}
        job |= {"seed": 0, "lr_multiplier": 1.0}
        lesson = session(job, find_data("multi30k", root))
        batches = [lesson.data.read(0, number) for number in range(count)]
        return lesson.lean.task.with_(batch=batches[0]), batches
    task = shoestring.builtin(model, batch=size)
    side = task.batch[0].shape[-1]
    images, labels = open_binary(find_data("cifar-10", root))[0].read(np.arange(size * count))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    images = F.interpolate((images / 255 - mean) / std, (side, side), mode="bilinear")
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    return task.with_(batch=batches[0]), batches


def learn(lean: Task, batch: Any, updates: int) -> None:
    """Lets `adaptive` measure its errors on a batch, and choose."""
    for hook in (hook for hook in lean.after_update if isinstance(hook, Adaptive)):
        piece = next(iter(lean.split(batch)))
        found = hook.measure(SimpleNamespace(task=lean, scale=None, microbatch=piece, updates=updates))  # type: ignore[arg-type]
        hook.remember(found)
        hook._take(hook.chosen(hook.limit))


def cosines(model: str, rules: list[str], root: str, updates: int, probes: int) -> dict[str, float]:
    """The whole gradient's cosine with the exact one under each of the rules."""
    task, batches = probed_task(model, root, updates + probes)
    leans = {rule: apply_settings(task, {"activations": sized(rule, task)}) for rule in rules}
    stepper = Stepper(task)
    for batch in batches[:updates]:
        stepper.step(batch)
    for lean in leans.values():
        learn(lean, batches[updates - 1], updates)
    found: dict[str, list[float]] = {rule: [] for rule in rules}
    for batch in batches[updates:]:
        with untouched(task.model):
            exact = gradients(task, batch)
        for rule, lean in leans.items():
            with untouched(task.model):
                lossy = gradients(lean, batch)
            found[rule].append(total(Overlap.of(exact[name], lossy[name]) for name in exact).cosine)
    return {rule: fmean(values) for rule, values in found.items()}


def ratios(model: str, rules: list[str], repeats: int, threads: int) -> dict[str, float]:
    """Seconds of a step under each of the rules over those of the better plain layout, in turn."""
    torch.set_num_threads(threads)
    task, size = builtin(model, MODELS[model].size), MODELS[model].size
    plans = [*PLAIN, *({"activations": sized(rule, task)} for rule in rules)]
    seconds = times(model, size, plans, repeats)
    return dict(zip(rules, (each / min(seconds[:2]) for each in seconds[2:]), strict=True))


# -- results ------------------------------------------------------------------------------------------------------
def read() -> list[dict[str, Any]]:
    return json.loads(ROWS.read_text())["rows"] if ROWS.exists() else []


def note(model: str, rules: str, **found: Any) -> None:
    """Adds to a row of the results file, which is written at once."""
    rows = read()
    row = next((row for row in rows if (row["model"], row["rules"]) == (model, rules)), None)
    if row is None:
        rows.append(row := {"model": model, "rules": rules, "size": MODELS[model].size, "probed": MODELS[model].probed})
    row |= found
    place = {name: number for number, name in enumerate(MODELS)}
    rows.sort(key=lambda row: place[row["model"]])  # within a model in the order of measuring
    ROWS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(model, rules, found, flush=True)


def missing(model: str, what: str, wanted: list[str]) -> list[str]:
    """The rules of a model that were not measured yet; a codec that does nothing in a model has no row."""
    there = {row["rules"] for row in read() if row["model"] == model and what in row}
    found = []
    for rules in (rules for rules in wanted if rules not in there):
        try:
            saved(model, rules)
        except (NoEffect, ShoestringError) as error:
            print(f"{model}, {rules}: {error}")
        else:
            found.append(rules)
    return found


def measure(model: str, args: argparse.Namespace) -> None:
    wanted = args.rules or [*UNIFORM, *MODELS[model].mixes]
    where = {"cpu": cpu_name(), "date": str(datetime.date.today())}
    if "saved" in args.measure:
        for rules in missing(model, "saved", wanted):
            note(model, rules, saved=round(saved(model, rules), 4))
    if "heap" in args.measure:
        for rules in missing(model, "heap", wanted):
            note(model, rules, heap=round(heap_share(model, rules), 4), plain_heap=plain_heap(model), **where)
    if "cosine" in args.measure and (rules := missing(model, "cosine", wanted)):
        for rule, cosine in cosines(model, rules, args.data, args.updates, args.probes).items():
            note(model, rule, cosine=round(cosine, 5), updates=args.updates, probes=args.probes)
    for threads in args.threads if "time" in args.measure else ():
        name = f"time, {threads}"
        rules = missing(model, name, wanted)
        for some in (rules[i : i + AT_ONCE] for i in range(0, len(rules), AT_ONCE)):
            load = os.getloadavg()[0]
            for rule, ratio in ratios(model, some, args.repeats, threads).items():
                note(model, rule, **{name: round(ratio, 3), "time_where": f"{cpu_name()}, load {load:.1f} before"})


# -- report -------------------------------------------------------------------------------------------------------
def table(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in ("saved", "heap", "cosine") if any(name in row for row in rows)]
    names += sorted({name for row in rows for name in row if name.startswith("time, ")})
    heads = {"saved": "saved", "heap": "peak", "cosine": "cosine"} | {
        name: f"time, {name[6:]} threads" for name in names if name.startswith("time")
    }
    lines = ["| model | rules | " + " | ".join(heads[name] for name in names) + " |", "|---" * (len(names) + 2) + "|"]
    before = ""
    for row in rows:
        size = f"{row['size']} {'tokens' if row['model'].startswith('dynamicconv') else 'images'}"
        model = f"`{row['model']}`, {size}" if row["model"] != before else ""
        before = row["model"]
        cells = [cell(name, row.get(name)) for name in names]
        lines.append(f"| {model} | `{row['rules']}` | {' | '.join(cells)} |")
    return lines


def cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "saved":
        return f"1 / {1 / value:.1f}"
    return f"{value:.4f}" if name == "cosine" else f"{value:.2f}"


def errors_beside(rows: list[dict[str, Any]]) -> list[str]:
    """`adaptive` beside the best uniform rules of at most its bytes: the squared sines between their gradients and the
    exact ones. `adaptive=RULES` has their bytes, and stands beside just those."""
    lines = []
    for row in (row for row in rows if row["rules"].startswith("adaptive") and "cosine" in row):
        uniform = [r for r in rows if r["model"] == row["model"] and "adaptive" not in r["rules"] and "cosine" in r]
        if beside := row["rules"].partition("=")[2]:
            fitting = [r for r in uniform if r["rules"] == beside]
        else:
            fitting = [r for r in uniform if r["saved"] <= row["saved"]]
        if fitting:
            other = max(fitting, key=_by("cosine"))
            ours, theirs = (1 - one["cosine"] ** 2 for one in (row, other))
            lines.append(
                f"- `{row['model']}`, adaptive at 1 / {1 / row['saved']:.1f}: {ours:.4f}; `{other['rules']}` at "
                f"1 / {1 / other['saved']:.1f}: {theirs:.4f}; {ours / theirs:.2f} of it"
            )
    return lines


def page(rows: list[dict[str, Any]]) -> str:
    about = "\n".join((__doc__ or "").strip().split("\n\n")[2].splitlines())
    probes = sorted({f"{row['probes']} after {row['updates']} updates" for row in rows if "probes" in row})
    where = sorted({f"{row['cpu']}, {row['date']}" for row in rows if "cpu" in row})
    timed = sorted({row["time_where"] for row in rows if "time_where" in row})
    untimed = "Times were not measured: the machine was never quiet. `--measure time` adds them."
    lines = [
        "# Compressed activations across architectures", "", about, "",
        f"Probes: {', '.join(probes)}. Heap: {', '.join(where)}.",
        f"Times: {', '.join(timed)}." if timed else untimed, "",
        *table(rows), "",
    ]  # fmt: skip
    if beside := errors_beside(rows):
        lines += ["## Adaptive beside uniform rules", f"{BESIDE_WORDS}:", "", *beside, ""]
    lines += ["Made by `python benchmarks/compressed.py --report` from [compressed.json](compressed.json).", ""]
    return "\n".join(lines)


# -- the card -----------------------------------------------------------------------------------------------------
def bests(rows: list[dict[str, Any]]) -> list[str]:
    """The smallest peak and the fewest bytes of each cosine, and the best cosine of each share of bytes."""
    lines = []
    for model in ("resnet18-imagenet", "wrn-28-2", "vit-tiny"):
        known = [row for row in rows if row["model"] == model and "cosine" in row]
        if near := [row for row in known if row["cosine"] >= 0.95 and "heap" in row]:
            lines.append(f"- `{model}`, smallest peak at a cosine of at least 0.95: {told(min(near, key=_by('heap')))}")
        for least in (0.95, 0.97):
            if near := [row for row in known if row["cosine"] >= least]:
                found = told(min(near, key=_by("saved")))
                lines.append(f"- `{model}`, fewest saved bytes at a cosine of at least {least}: {found}")
        for share in (4, 8, 10):
            if small := [row for row in known if row["saved"] <= 1 / share + 5e-5]:
                found = told(max(small, key=_by("cosine")))
                lines.append(f"- `{model}`, best cosine at 1 / {share} of the saved bytes or less: {found}")
    return lines


def _by(name: str) -> Any:
    return lambda row: row[name]


def told(row: dict[str, Any]) -> str:
    peak = f", peak {row['heap']:.3f} of plain PyTorch" if "heap" in row else ""
    return f"`{row['rules']}`, saved 1 / {1 / row['saved']:.1f}, cosine {row['cosine']:.4f}{peak}"


def card(rows: list[dict[str, Any]]) -> str:
    """The section of the card, between its marks."""
    shown = [row for row in rows if row["model"] in ("resnet18-imagenet", "vit-tiny") and "cosine" in row]
    where = sorted({row["cpu"] for row in rows if "cpu" in row}) or [cpu_name()]
    probes = sorted({f"{row['probes']} batches after {row['updates']} updates" for row in shown})
    return "\n".join([
        BEGIN, "## Measured: codecs and mixes of them",
        "Saved bytes and the heap's peak over plain PyTorch's, and the cosine of the whole gradient with the exact one",
        f"({'; '.join(probes)}; CIFAR-10's images, enlarged to the model's size). All models, and what each figure is:",
        f"[compressed.md](../compressed.md). Made by `python benchmarks/compressed.py`; CPU: {', '.join(where)}.", "",
        *table(shown), "", *bests(rows), "", f"{BESIDE_WORDS}:", "",
        *errors_beside(rows), END,
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rules", nargs="+", help="in place of each model's own")
    parser.add_argument("--measure", nargs="+", choices=WHAT, default=[])
    parser.add_argument("--data", help="the folder that holds cifar-10-batches-bin and multi30k.de-en")
    parser.add_argument("--updates", type=int, default=10, help="before the probes")
    parser.add_argument("--probes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    for model in args.models if args.measure else ():
        measure(model, args)
    if args.report:
        ROWS.with_suffix(".md").write_text(page(read()))
        before, _, rest = CARD.read_text().partition(BEGIN)
        CARD.write_text(before + card(read()) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
