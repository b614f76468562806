"""`shoestring report RUN -o page.html`: one page, for a browser, of a run, of two, or of a study."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from .options import command, output_file, path_name, print_json, say, some_path, write_text

EXAMPLES = (
    "runs/wrn-28-2 -o page.html",
    "runs/plain runs/lean -o both.html",
    "table3 --scale memory -o table3.html",
)
HELP = "the folder of a run (two are compared), a study's name, or a file of `shoestring study report NAME --json`"


def add(subparsers: Any) -> None:
    parser = command(subparsers, "report", run, "write a page of a run or a study, for any browser", EXAMPLES)
    parser.add_argument("subjects", type=path_name, nargs="+", metavar="RUN_OR_STUDY", help=HELP)
    parser.add_argument(
        "--scale", choices=("memory", "small", "full"), default="memory", help="of a study (default: memory)"
    )
    parser.add_argument(
        "--store",
        type=some_path,
        default=Path("runs/studies"),
        metavar="DIR",
        help="of a study's results (default: runs/studies)",
    )
    parser.add_argument("--data", type=path_name, metavar="DIR", help="the data that a study was trained on")
    parser.add_argument(
        "--fidelity",
        type=path_name,
        metavar="FILE",
        help="of a run with compressed activations: cosines by layer, a file of `shoestring fidelity MODEL --json`",
    )
    parser.add_argument(
        "-o", "--output", type=output_file(".html"), required=True, metavar="FILE", help="the page, one file"
    )


def run(args: argparse.Namespace) -> int:
    from ..reporting.page import page_html

    data = _data(args)
    if args.fidelity:
        _add_fidelity(data["runs"], args.fidelity)
    for shown in data["runs"]:
        for note in shown["notes"]:
            say(f"{shown['name']}: {note}")
    text = page_html(data)
    write_text(args.output, text)
    if args.json:
        print_json({"page": str(args.output), "bytes": len(text.encode()), "runs": len(data["runs"])})
    else:
        print(f"wrote {args.output}: open it in a browser")
    return 0


def _data(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments -> the data of their page."""
    from ..reporting.page import page_data, run_data, study_data

    if len(args.subjects) > 2:
        raise ShoestringError(f"{len(args.subjects)} runs are named: a page shows one, or compares two")
    if all(Path(name).is_dir() for name in args.subjects):
        runs = [run_data(Path(name)) for name in args.subjects]
        return page_data(" and ".join(run["name"] for run in runs), runs)
    (name, *others) = args.subjects
    if others:
        missing = next(name for name in args.subjects if not Path(name).is_dir())
        raise ShoestringError(f"{missing!r} is no folder of a run: only runs are compared")
    study = study_data(_named_study(name, args) or _study_file(name), name)
    return page_data(study["place"] or study["name"] or name, study=study)


def _add_fidelity(runs: list[dict[str, Any]], name: str) -> None:
    """Puts the cosines of a file beside what the runs' codecs store; refuses one that tells nothing of them."""
    from ..records import file_bytes, matches, read_object
    from ..reporting.page import with_fidelity

    if not runs:
        raise ShoestringError("--fidelity is about the layers of a run: name its folder, not a study")
    try:
        found = read_object(file_bytes(Path(name)))
        rows = found["layers"]
        texts = [[row["module"], row["codec"]] for row in rows]
        if not matches(texts, list[list[str]]) or not matches([row["cosine"] for row in rows], list[float]):
            raise ValueError("a layer has no module, codec and cosine")
    except OSError as error:
        raise ShoestringError(f"{name!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ShoestringError(
            f"{name!r} is no fidelity of layers ({error}): make it with `shoestring fidelity MODEL --json > FILE`"
        ) from error
    if not sum(with_fidelity(run, found) for run in runs):
        raise ShoestringError(
            f"{name!r} knows no layer of {' and '.join(run['name'] for run in runs)} under the codec that stores it: "
            "measure the run's model with the run's codecs, `shoestring fidelity MODEL --codecs C,... --json > FILE`"
        )


def _named_study(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The report of a study as far as it is done; None if no study has that name."""
    from ..studies.jobs import Store
    from ..studies.results import report
    from ..studies.study import load, names

    known = name in names() or name.endswith(".toml")
    return report(load(name), args.scale, Store(args.store), args.data) if known else None


def _study_file(name: str) -> dict[str, Any]:
    """A study's report, from a file."""
    from ..records import file_bytes, read_object

    try:
        found = read_object(file_bytes(Path(name)))
    except FileNotFoundError:
        raise ShoestringError(
            f"{name!r} is neither the folder of a run, nor a study (see `shoestring study list`), nor a file of one"
        ) from None
    except OSError as error:
        raise ShoestringError(f"{name!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        what = "JSON" if isinstance(error, json.JSONDecodeError) else "report of a study"
        raise ShoestringError(
            f"{name!r} is no {what} ({error}): make it with `shoestring study report NAME --json`"
        ) from error
    return found
