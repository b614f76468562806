"""`shoestring study`: reruns the papers' tables and figures."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ShoestringError
from .options import command, path_name, print_json, some_path, whole_number

if TYPE_CHECKING:
    from ..studies.jobs import Store

EXAMPLES = (
    "list",
    "show table3",
    "run table3 --scale memory",
    "run figure3 --scale small --data DIR --jobs 2",
    "status figure3 --scale small --data DIR",
    "report table3 --scale memory --json",
)
ACTIONS = ("list", "show", "run", "status", "report", "import")


def add(subparsers: Any) -> None:
    parser = command(subparsers, "study", run, "run the papers' tables and figures again", EXAMPLES)
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS), nargs="?")
    which = "its name, or a .toml file (see `study list`); import: a results file"
    parser.add_argument("name", type=path_name, nargs="?", metavar="STUDY", help=which)
    parser.add_argument(
        "--scale", choices=("memory", "small", "full"), default="memory",
        help="memory: count and measure, train nothing (default); small: minutes to an hour a trial; full: the paper's",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=path_name, metavar="DIR", help="the folder that holds cifar-10-batches-bin, multi30k.de-en, ..."
    )
    where = "where jobs and results are; machines that share it share the work (default: runs/studies)"
    parser.add_argument("--store", type=some_path, default=Path("runs/studies"), metavar="DIR", help=where)
    cores, side = os.cpu_count() or 1, "side by side (default: one per core)"
    parser.add_argument("--jobs", type=whole_number(1, 1024), default=cores, metavar="N", help=side)
    parser.add_argument("--threads", type=whole_number(1, 1024), default=1, metavar="N", help="per job (default: 1)")
    parser.add_argument("--nice", type=whole_number(0, 19), default=10, metavar="N", help="of the jobs (default: 10)")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where jobs run (default: local)")
    parser.add_argument(
        "--output", type=some_path, metavar="DIR", help="report: also write JSON, figure and page there"
    )
    parser.add_argument("--retry", action="store_true", help="also run again what failed")


def run(args: argparse.Namespace) -> int:
    from ..studies import study as studies

    if args.action is None:
        raise ShoestringError(f"say what to do: {', '.join(ACTIONS)}; `shoestring study list` names the studies")
    if args.action == "list":
        return _list(args)
    if args.name is None:
        raise ShoestringError(f"`study {args.action}` needs a study: one of {', '.join(studies.names())}")
    actions = {"show": _show, "run": _run, "status": _status, "report": _report, "import": _import}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from ..studies.study import PAPERS, load, names

    found = [load(name) for name in names()]
    if args.json:
        print_json([{"study": s.name, "place": s.place, "title": s.title, "paper": PAPERS[s.paper]} for s in found])
        return 0
    name, place = (max(len(getattr(study, column)) for study in found) for column in ("name", "place"))
    for study in found:
        print(f"{study.name:<{name}}  {study.place:<{place}}  {study.title}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from ..studies.study import PAPERS, load

    study = load(args.name)
    if args.json:
        from dataclasses import asdict

        print_json(asdict(study))
        return 0
    print(f"{study.place}: {study.title}\n{PAPERS[study.paper]}")
    if study.about:
        print(study.about)
    print(f"{len(study.rows)} rows of {study.model}:")
    for row in study.rows:
        printed = ", ".join(f"{key} {value}" for key, value in row.paper.items())
        print(f"  {row.label:<28} {'paper: ' + printed if printed else ''}".rstrip())
    for name, scale in study.scales.items():
        length = f"{scale.epochs} epochs" if scale.epochs else f"{scale.updates} updates"
        print(f"scale {name}: {length} on {scale.data}, {len(scale.seeds)} seed(s) per row unless told")
    print("claims:")
    for claim in study.claims:
        print(f"  {claim['claim']}")
    return 0


def _store(args: argparse.Namespace) -> "Store":
    from ..studies.jobs import Store

    return Store(args.store)


def _run(args: argparse.Namespace) -> int:
    from ..studies.runner import jobs_of, run, seconds_left
    from ..studies.study import load

    study, store = load(args.name), _store(args)
    if args.scale != "memory" and study.scale(args.scale) is None:
        raise ShoestringError(f"{study.name} is not trained at scale {args.scale}: use --scale memory")
    jobs = jobs_of(study, args.scale, args.data)

    def tell(what: str, job: dict[str, Any], more: str) -> None:
        done = sum(store.state(other) in ("done", "failed") for other in jobs)
        left = seconds_left(store, jobs, args.jobs)
        rest = f", about {left / 60:,.0f} min left" if left else ""
        words = " ".join(f"{key}={value}" for key, value in job["settings"].items())
        seed = f" seed {job['seed']}" if "seed" in job else ""
        reason = f": {more}" if more else ""
        print(f"[{done}/{len(jobs)}{rest}] {what} {job['kind']} {job['model']} {words}{seed}{reason}", file=sys.stderr)

    run(store, jobs, workers=args.jobs, threads=args.threads, nice=args.nice, root=args.data, engine=args.engine,
        retry=args.retry, progress=tell)  # fmt: skip
    return _report(args)


def _status(args: argparse.Namespace) -> int:
    from ..studies.runner import jobs_of, seconds_left
    from ..studies.study import load

    study, store = load(args.name), _store(args)
    jobs = jobs_of(study, args.scale, args.data)
    states = [store.state(job) for job in jobs]
    counts = {state: states.count(state) for state in ("done", "running", "waiting", "failed")}
    failures = [reason for job in jobs if (reason := store.reason(job))]
    left = seconds_left(store, jobs, args.jobs)
    if args.json:
        print_json({"study": study.name, "scale": args.scale, **counts, "seconds_left": left, "failures": failures})
        return 0
    rest = f"; about {left / 60:,.0f} min left with --jobs {args.jobs}" if left and counts["waiting"] else ""
    print(f"{study.name} at {args.scale}: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + rest)
    for reason in failures:
        print(f"  failed: {reason}")
    return 0


def _import(args: argparse.Namespace) -> int:
    """Takes the trials and steps of a results file (`study report NAME --output DIR`) into the store."""
    from ..studies.results import import_results

    new = import_results(Path(args.name), _store(args))
    print(f"{new} trials and measured steps of {args.name} are new in {args.store}", file=sys.stderr)
    return 0


def _take_over(path: Path, store: "Store") -> None:
    """What another store has recorded in the file that is to be written is not lost."""
    from ..studies.results import import_results

    if not path.exists():
        return
    try:
        new = import_results(path, store)
    except ShoestringError as error:
        print(f"nothing is taken over: {error}", file=sys.stderr)
    else:
        if new:
            print(f"took over {new} trials and measured steps of {path} into {store.path}", file=sys.stderr)


def _report(args: argparse.Namespace) -> int:
    from ..reporting.studies import lines
    from ..studies.results import report
    from ..studies.study import load

    study = load(args.name)
    store = _store(args)
    if args.output is not None:
        _take_over(args.output / f"{study.name}.{args.scale}.json", store)
    found = report(study, args.scale, store, args.data)
    if args.output is not None:
        from ..reporting.results import write_results
        from ..studies.results import steps, trials

        if not any(row["measured_bytes"] or row["seeds"] for row in found["rows"]):
            raise ShoestringError(
                f"nothing of {study.name} at {args.scale} is done in {args.store}, so nothing was written: "
                f"run `shoestring study run {args.name} --scale {args.scale}` with this --store"
            )
        trained, measured = trials(study, args.scale, store, args.data), steps(study, args.scale, store)
        for path in write_results(args.output, study, found, trained, measured):
            print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print_json(found)
    else:
        print("\n".join(lines(study, found)))
    return 0
