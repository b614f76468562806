"""A profile's JSON (and its ledger, if there is one) -> the page that `shoestring profile` prints.

Rows are cut to the width, never wrapped. On a terminal the bars have colours, and sentences are wrapped; elsewhere all
is plain text, and a sentence is one line unless COLUMNS is set.
"""

import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from ..ledger import Ledger
from ..techniques.words import in_words
from ..units import format_bytes, format_flops
from .palette import in_order, look
from .timeline import Timeline, timeline

WIDEST = 100  # a page wider than this is harder to read, not easier
LAYERS = 10
CHART_ROWS = 4
_AMOUNT, _SHARE, _GAP = 10, 7, 2  # widths of the columns of numbers, and the space before bars
_NAMED = 14  # of the name of a plan's file


class Page:
    """The width and the characters that a page is made of."""

    def __init__(self, width: int = 80, ascii_only: bool = False, wraps: bool = True) -> None:
        self.width = max(60, min(width, WIDEST))
        self.sentence = self.width if wraps else 10**6  # columns for a sentence
        self.levels = " ..::-=##" if ascii_only else " ▁▂▃▄▅▆▇█"
        self.eighths = " .......#" if ascii_only else " ▏▎▍▌▋▊▉█"
        self.cut = "..." if ascii_only else "…"
        self.dot = " - " if ascii_only else " · "
        self.mark = "^ peak" if ascii_only else "▲ peak"
        self.name = (self.width - _AMOUNT - _SHARE - _GAP) // 2 - 2
        self.bar = self.width - self.name - _AMOUNT - _SHARE - _GAP


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would exit by itself, with another code


def make_console(**settings: Any) -> Console:
    """A console for our pages: names of layers are never interpreted as markup."""
    return _Console(highlight=False, markup=False, emoji=False, **settings)


def show_profile(console: Console, data: dict[str, Any], ledger: Ledger | None = None) -> None:
    """Prints where the memory goes: categories, layers, timeline, FLOPs, and what could not be seen."""
    page = _page(console)
    _print(console, profile_lines(data, ledger, page), page)


def _page(console: Console) -> Page:
    wraps = console.is_terminal or "COLUMNS" in os.environ  # whoever asks for a width has it
    return Page(console.width, console.options.ascii_only, wraps)


def _print(console: Console, lines: Iterable[Text], page: Page) -> None:
    for line in lines:
        line.truncate(page.sentence)
        line.rstrip()
        console.print(line, soft_wrap=True)


def profile_lines(data: dict[str, Any], ledger: Ledger | None, page: Page) -> Iterator[Text]:
    """The page of a profile, line by line."""
    yield from _headline(data, page)
    yield from _peak(data["peak"], data.get("budget_bytes"), page)
    yield Text()
    yield from _categories(data, page)
    if data["by_module"]:
        yield Text()
        yield from _layers(data, page)
    if ledger is not None and ledger.entries:
        yield Text()
        yield from _chart(ledger, page)
    yield Text()
    yield _flops(data["flops"])
    for words in data.get("unseen", []):
        for number, line in enumerate(textwrap.wrap(words, page.sentence - 10)):
            yield Text("Unsure    " if number == 0 else " " * 10, "yellow").append(line, "default")


def show_comparison(console: Console, data: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Prints two profiles of a model side by side: bytes by category, and the second as a share of the first."""
    page = _page(console)
    total = max(data["bytes"]["total"], other["bytes"]["total"])
    name = name if len(name) <= _NAMED else name[: _NAMED - len(page.cut)] + page.cut
    head = (
        f"{'Where it goes, ' + _unit(total)[1]:<{page.name}}{'this':>{_AMOUNT}}{name:>{_NAMED + 2}}{'share':>{_SHARE}}"
    )
    lines = [*_headline(data, page), *_headline(other, page), Text(), Text(head, "bold")]
    this, that = data["by_category"], other["by_category"]
    for kind in in_order({kind: max(this[kind], that[kind]) for kind in this}):
        lines.append(_beside(look(kind).label, this[kind], that[kind], total, page))
    if None in (data["bytes"]["workspace"], other["bytes"]["workspace"]):
        lines.append(Text("workspace of PyTorch's operators: unknown, not calibrated", "yellow"))
    lines.append(_beside("peak", data["bytes"]["total"], other["bytes"]["total"], total, page))
    needed, less = (each["bytes"]["total"] + each["object_bytes"] for each in (data, other))
    lines.append(_beside("with Python objects", needed, less, total, page))
    for words, each in (("this", data), (name, other)):
        lines += [
            Text(),
            Text(words, "bold"),
            *_peak(each["peak"], each.get("budget_bytes"), page),
            _flops(each["flops"]),
        ]
    _print(console, lines, page)


# -- the parts of the page --------------------------------------------------------------------------------
def _headline(data: dict[str, Any], page: Page) -> Iterator[Text]:
    """The task, the rules and the settings; on two lines if they do not fit on one."""
    settings = [f"{name}\u00a0{in_words(value)}" for name, value in data["settings"].items()]
    words = page.dot.join([data["task"], f"{data['rules']}\u00a0rules", *settings])
    for line in textwrap.wrap(words, page.sentence):
        yield Text(line.replace("\u00a0", " "), "bold")


def _peak(peak: dict[str, Any], budget_bytes: int | None, page: Page) -> Iterator[Text]:
    """How much, of which budget, and where; on two lines if they do not fit on one."""
    phase = {"update": "the optimizer's update", "forward": "the forward pass", "backward": "the backward pass"}
    operation = str(peak.get("operation") or "").split(".")[0]
    budget = f" of a budget of {format_bytes(budget_bytes)}," if budget_bytes else ""
    where = [f"in {phase.get(str(peak['phase']), peak['phase'])}", peak["module"] and f"at layer {peak['module']}"]
    made = f" (a tensor of {operation})" if operation else ""
    words = f"{format_bytes(peak['bytes'])}{budget} {', '.join(filter(None, where))}{made}"
    for number, line in enumerate(textwrap.wrap(words, page.sentence - 5)):
        size = len(format_bytes(peak["bytes"])) if number == 0 else 0
        yield Text("Peak " if number == 0 else " " * 5).append(line[:size], "bold").append(line[size:], "not bold")


def _categories(data: dict[str, Any], page: Page) -> Iterator[Text]:
    """Bytes by category, each with a bar of its share of the peak."""
    total = data["bytes"]["total"]
    yield _heading("Where it goes", total, page)
    for kind, size in in_order(data["by_category"]).items():
        yield _row(look(kind).label, size, total, page).append(_bar({kind: size}, total, page.bar, page))
    if data["bytes"]["workspace"] is None:
        unknown = " " * (_AMOUNT + _SHARE + _GAP) + "unknown: not calibrated"
        yield Text("workspace".ljust(page.name)).append(unknown, "yellow")
    yield _row("peak", total, total, page, "bold")
    if (objects := data.get("object_bytes")) and data["rules"] == "real":  # the paper counts none
        yield _row("with Python objects", total + objects, total, page, "dim")


def _layers(data: dict[str, Any], page: Page) -> Iterator[Text]:
    """The heaviest layers, each with a bar of its categories and the name of the largest."""
    rows, total = _alike(data["by_module"])[:LAYERS], data["bytes"]["total"]
    room = page.bar - 21  # for the name of a category
    yield _heading("Heaviest layers, own bytes", total, page)
    for row in rows:
        kinds = in_order({name: size for name, size in row.items() if name not in ("module", "bytes")})
        kinds = kinds or {"": row["bytes"]}
        bar = _bar(kinds, rows[0]["bytes"], room, page)
        bar.pad_right(room - bar.cell_len + 1)
        largest = look(max(kinds, key=lambda kind: kinds[kind])).label
        name = row["module"] or "(outside any layer)"
        yield _row(name, row["bytes"], total, page).append(bar).append(largest, "dim")


def _alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with layers that differ in one number of their names and in nothing else made one: blocks.1-3 (each)."""
    groups: dict[tuple, list[tuple[str, int, str]]] = {}
    for row in rows:
        head, number, tail = _number_in(row["module"])
        rest = tuple((name, value) for name, value in row.items() if name != "module")
        groups.setdefault((head, number is None or tail, rest), []).append((head, number or 0, tail))
    found = []
    for (_, plain, rest), names in groups.items():
        head, _, tail = names[0]
        name = head if plain is True else f"{head}{spans(number for _, number, _ in names)}{tail}"
        name += " (each)" if len(names) > 1 else ""
        found.append({"module": name} | dict(rest))
    return found


def _number_in(name: str) -> tuple[str, int | None, str]:
    """A layer's name -> what is before its first number, the number, and what is after it."""
    parts = re.split(r"(?<![^.])(\d+)(?![^.])", name, maxsplit=1)
    return (parts[0], int(parts[1]), parts[2]) if len(parts) == 3 else (name, None, "")


def spans(numbers: Iterable[int]) -> str:
    """Numbers -> 1-3,5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def _chart(ledger: Ledger, page: Page) -> Iterator[Text]:
    """The last step as a chart of CHART_ROWS rows, the phases and the peak under it."""
    steps = timeline(ledger, page.width - 10, stretch=True)
    top = max(steps.totals)
    yield Text("One step", "bold")
    for row in reversed(range(CHART_ROWS)):
        label = {CHART_ROWS - 1: format_bytes(top, 3), 0: "0"}.get(row, "")
        cells = (page.levels[_eighth(size / max(1, top) * CHART_ROWS - row)] for size in steps.totals)
        yield Text(f"{label:>9} ").append("".join(cells), look("activation").colour)
    yield Text(" " * 10 + _ruler(steps), "dim")
    column = min(steps.peak_column, page.width - 10 - len(page.mark))
    yield Text(" " * (10 + column) + page.mark, "bold")


def _ruler(steps: Timeline) -> str:
    """The names of the phases under their columns, if they fit; with many microbatches, their number."""
    if steps.microbatches > 1:
        return f"{steps.microbatches} microbatches, then the update"
    rooms = [(f"|{span.phase}", span.end - span.first) for span in steps.spans]
    return "".join((word if len(word) <= room else "|").ljust(room) for word, room in rooms)


def _flops(flops: dict[str, float]) -> Text:
    parts = (("forward", "forward"), ("backward", "backward"), ("recompute", "recomputed"))
    words = ", ".join(f"{format_flops(flops[key])} {word}" for key, word in parts if flops[key])
    words = words.replace("FLOP", "") + (f" ({flops['ratio']:.2f}x in all)" if flops["recompute"] else "")
    return Text("FLOPs     ", "bold").append(words, "not bold")


# -- the parts of a row -----------------------------------------------------------------------------------
def _heading(title: str, total: int, page: Page) -> Text:
    return Text(f"{title:<{page.name}}{_unit(total)[1]:>{_AMOUNT}}{'share':>{_SHARE}}", "bold")


def _row(name: str, size: int, total: int, page: Page, style: str = "") -> Text:
    """A name, its bytes and its share; a long name is cut at the front, because the end distinguishes layers."""
    if len(name) > page.name:
        name = page.cut + name[len(name) - page.name + len(page.cut) :]
    share = f"{size / max(1, total):.1%}"
    return Text(f"{name:<{page.name}}{_amount(size, total):>{_AMOUNT}}{share:>{_SHARE}}{'':{_GAP}}", style)


def _beside(name: str, size: int, other: int, total: int, page: Page) -> Text:
    share = f"{other / size:.1%}" if size else ""
    return Text(
        f"{name:<{page.name}}{_amount(size, total):>{_AMOUNT}}{_amount(other, total):>{_NAMED + 2}}{share:>{_SHARE}}"
    )


def _amount(size: int, total: int) -> str:
    factor = _unit(total)[0]
    digits = 0 if factor == 1 else 3 if total < 1000 * factor else 1
    return f"{size / factor:,.{digits}f}"


def _unit(total: int) -> tuple[int, str]:
    """The one unit of all sizes on a page, so that decimal points align."""
    if total >= 10**11:
        return 10**9, "GB"
    return (10**6, "MB") if total >= 10**6 else (10**3, "KB") if total >= 10**3 else (1, "B")


def _bar(kinds: dict[str, int], full: int, width: int, page: Page) -> Text:
    """Bytes by category -> a bar in which `full` bytes would fill `width` columns."""
    bar, end = Text(), 0.0
    for kind, size in kinds.items():
        end = min(width, end + size / max(1, full) * width)
        bar.append(page.eighths[8] * (int(end) - len(bar)), look(kind).colour)
    rest = page.eighths[_eighth(end - len(bar))].strip()
    return bar.append(rest, look(kind).colour) if rest else bar


def _eighth(part: float) -> int:
    """A fraction of a character cell -> the number of its eighths to fill."""
    return min(8, max(0, round(part * 8)))
