"""Pictures of memory: a step's timeline beside its parts, two timelines, and the style of all our figures.

Needs the extra `plot`. The suffix decides the file format: .svg, .png or .pdf.
"""

import html
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NotWritten, ShoestringError, how_to_install
from ..ledger import Ledger, Phase
from ..techniques.words import in_words
from ..units import format_bytes
from .palette import ACCENT, FAINT, INK, MUTED, in_order, is_light, look, sort_kinds
from .timeline import Timeline, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
_COLUMNS = 300  # as many as a printed figure can show
_MARGIN, _TITLE_LETTER = 0.12, 0.094  # inches: of the title, and the mean width of its letters
ORDER = "one step: allocations in their order (not time)"
# A page in dark colours shows our inks and papers the other way round; colours of categories, and what is written on
# them, stay.
_ON_LIGHT, _ON_DARK = "#212121", "#fefefe"
_DARK = "".join(
    f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
    for light, dark in (
        (INK, "#e8e8e8"),
        (MUTED, "#a8a8a8"),
        (FAINT, "#3a3a3a"),
        (ACCENT, "#35b8ae"),
        ("#ffffff", "#16181c"),
    )
    for part in ("fill", "stroke")
)
HALO = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.95}
_STYLE: Any = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.hashsalt": "shoestring",  # the same data gives the same file
    "svg.fonttype": "none",  # text as text: small files, and a reader can find the words
    "font.family": "sans-serif",
}


def profile_figure(path: str | Path, data: dict[str, Any], ledger: Ledger | None = None) -> None:
    """A profile's JSON and ledger -> the stacked timeline of a step, beside the pie of its peak."""
    parts = ", ".join(f"{look(k).label} {format_bytes(v)}" for k, v in in_order(data["by_category"]).items())
    about = f"{format_bytes(data['bytes']['total'])} at the peak: {parts}."
    with figure_file(
        path, 11.0 if ledger else 4.4, 4.8, f"Memory of a training step of {data['task']}", about
    ) as figure:
        left, width = (0.67, 0.32) if ledger else (0.06, 0.88)
        figure.text(0.012 if ledger else left, 0.94, data["task"], size=13, weight="bold")
        words = [f"{name} {in_words(value)}" for name, value in data["settings"].items()] + [f"{data['rules']} rules"]
        figure.text(left + width, 0.94, " · ".join(words), color=MUTED, ha="right")
        _pie(figure.add_axes((left, 0.4, width, 0.5)), data)
        shown = set(in_order(data["by_category"]))
        if ledger:
            steps = timeline(ledger, _COLUMNS)
            axes = figure.add_axes((0.065, 0.07, 0.57, 0.77))
            budget = data.get("budget_bytes") or 0
            _stack(axes, steps, data, budget)
            if budget:
                _memory_axis(axes, max(max(steps.totals), budget))
                _mark_budget(axes, budget, on_left=_is_late(steps))
            shown |= {kind for kind, sizes in steps.parts.items() if any(sizes)}
        _legend(figure.add_axes((left, 0.02, width, 0.36)), sort_kinds(shown), data)


def overlay_figure(
    path: str | Path,
    plain: Ledger,
    lean: Ledger,
    names: tuple[str, str] = ("plain", "lean"),
    title: str = "A training step, plain and lean",
    budget_bytes: int | None = None,
) -> None:
    """Two ledgers -> the plain step by category, the lean one under it, and that enlarged, with the budget."""
    steps, small = timeline(plain, _COLUMNS // 2), timeline(lean, _COLUMNS // 3)
    top, least = max(steps.totals), max(small.totals)
    words = (
        f"{names[0]} needs {format_bytes(top)} at its peak, {names[1]} {format_bytes(least)}, {top / least:.1f}x less"
    )
    with figure_file(path, 8.5, 4.6, title, f"Memory over one training step: {words}.") as figure:
        figure.text(0.02, 0.945, title, size=12, weight="bold")
        axes = figure.add_axes((0.085, 0.09, 0.56, 0.76))
        known = len(steps.spans) > 1  # a meter knows neither phases nor what its blocks are for
        _areas(axes, steps, size=9.5 if known else 0)
        axes.step(_spread(small, len(steps.totals)), small.totals, where="post", color=ACCENT, lw=1.4)
        axes.set(xlim=(0, len(steps.totals) - 1), xticks=[], xlabel=ORDER)
        if known:
            _name_phases(axes, steps)
        _mark_peak(axes, steps, {"module": ""}, f"{names[0]}:\n{format_bytes(top)}")
        inset = figure.add_axes((0.735, 0.09, 0.25, 0.55))
        _areas(inset, small, size=7.0 if known else 0)
        _memory_axis(inset, max(least, budget_bytes or 0))
        inset.set(xlim=(0, len(small.totals) - 1), xticks=[], xlabel="the same, enlarged")
        if budget_bytes:
            _mark_budget(inset, budget_bytes)
        less = f"{names[1]}: {format_bytes(least)},\n{top / least:.1f}x less"
        figure.text(0.735, 0.75, less, color=ACCENT, weight="bold", size=11, va="center")
        if known:
            figure.text(0.735, 0.67, _pieces(small), color=MUTED, size=8.5, va="center")


def _pieces(steps: Timeline) -> str:
    many = steps.microbatches > 1
    return f"{steps.microbatches} microbatches, then the update" if many else "one pass and the update"


def _spread(steps: Timeline, columns: int) -> list[float]:
    """The places of a timeline's columns over those of another."""
    return [column * columns / len(steps.totals) for column in range(len(steps.totals))]


def _mark_budget(axes: "Axes", budget_bytes: int, on_left: bool = False) -> None:
    """The budget's line; its words are at the side where those of the peak are not."""
    axes.axhline(budget_bytes, color=INK, lw=1, ls=(0, (4, 3)))
    x, shift, side = (0, 2, "left") if on_left else (1, -2, "right")
    axes.annotate(f"budget {format_bytes(budget_bytes, 3)}", (x, budget_bytes), (shift, 3), ha=side, size=8.5,
                  xycoords=axes.get_yaxis_transform(), textcoords="offset points")  # fmt: skip


def beside_figure(path: str | Path, data: dict[str, Any], predicted: Ledger, measured: Ledger) -> None:
    """A profile's JSON and ledger, and the ledger of a meter -> both steps side by side on one scale."""
    with figure_file(path, 11.0, 4.2, f"Memory of a training step of {data['task']}, predicted and measured") as figure:
        axes = [figure.add_axes((x, 0.09, 0.44, 0.72)) for x in (0.065, 0.545)]
        _stack(axes[0], timeline(predicted, _COLUMNS), data)
        _outline(axes[1], "", timeline(measured, _COLUMNS), MUTED, measured.peak().bytes)
        top = max(predicted.peak().bytes, measured.peak().bytes)
        for frame, title in zip(axes, ("predicted", "measured"), strict=True):
            _memory_axis(frame, top)
            frame.set_title(title, loc="left", weight="bold", pad=22)
            frame.set(xticks=[], xlabel=ORDER)
        axes[1].set(xlim=(0, 1), yticklabels=[])


def title_lines(title: str, width: float) -> list[str]:
    """A figure's title, cut into lines that fit its width in inches."""
    return textwrap.wrap(title, int((width - 2 * _MARGIN) / _TITLE_LETTER))


def write_title(figure: "Figure", title: str) -> None:
    """Writes a title at the top left."""
    width, height = figure.get_size_inches()
    text = "\n".join(title_lines(title, width))
    figure.text(_MARGIN / width, 1 - _MARGIN / height, text, size=11.5, weight="bold", va="top")


@contextmanager
def figure_file(path: str | Path, width: float, height: float, title: str = "", about: str = "") -> Iterator["Figure"]:
    """A figure in our style, saved to `path` at the end; an SVG has its title and description, and a dark form."""
    require_plot()
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ShoestringError(f"{str(path)!r} must end in {', '.join(SUFFIXES)}")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        undated = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        try:
            figure.savefig(path, dpi=160, metadata=undated)
        except OSError as error:
            raise NotWritten.because(path, error) from error
        if undated:
            _describe(Path(path), title, about)


def _describe(path: Path, title: str, about: str) -> None:
    """Adds what a reader that cannot see the picture is told, and the colours of a dark page."""
    text = path.read_text("utf-8")
    end = text.index(">", text.index("<svg")) + 1
    style = f"<style>@media (prefers-color-scheme: dark) {{{_DARK}}}</style>"
    told = f"<title>{html.escape(title)}</title><desc>{html.escape(about)}</desc>"
    # Of a path's places a tenth of a point is less than can be seen.
    short = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text[end:])
    path.write_text(text[:end] + told + style + short, "utf-8")


def require_plot() -> None:
    """Raises, with the command that helps, if matplotlib is missing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ShoestringError(f"figures need matplotlib: {how_to_install('plot')}")


# -- a step -----------------------------------------------------------------------------------------------
def _stack(axes: "Axes", steps: Timeline, data: dict[str, Any], budget_bytes: int = 0) -> None:
    """The bytes of each category over a step, stacked; phases above, the peak marked."""
    _areas(axes, steps)
    axes.set(xlim=(0, len(steps.totals) - 1), xticks=[], xlabel=ORDER)
    _name_phases(axes, steps)
    _mark_peak(axes, steps, data["peak"], budget_bytes=budget_bytes)


def _areas(axes: "Axes", steps: Timeline, size: float = 9.5) -> None:
    """The bytes of each category, stacked, with their names where there is room, in letters of this size (0: none)."""
    kinds = sort_kinds(kind for kind, sizes in steps.parts.items() if any(sizes))
    top, floor = max(steps.totals), [0] * len(steps.totals)
    for kind in kinds:
        roof = [low + size for low, size in zip(floor, steps.parts[kind], strict=True)]
        drawn = changes(floor, roof)
        low, high = ([line[column] for column in drawn] for line in (floor, roof))
        axes.fill_between(drawn, low, high, step="post", color=look(kind).colour, lw=0)
        if kind != kinds[-1] and steps.microbatches == 1:  # between many, it would hide the narrow ones
            axes.step(range(len(roof)), roof, where="post", color="white", lw=0.5)
        if size:
            _name_area(axes, kind, floor, roof, top, size)
        floor = roof
    _memory_axis(axes, top)


def _name_area(axes: "Axes", kind: str, floor: list[int], roof: list[int], top: int, size: float) -> None:
    """Writes a category's name where its area has the most room, if it has enough."""
    label, colour = look(kind).label, look(kind).colour
    inches = axes.get_position().width * axes.get_figure().get_figwidth()  # type: ignore[union-attr]
    width = max(1, round(len(floor) * 0.0102 * size / inches * len(label)))
    middle = (len(floor) - width) // 2

    def bounds(start: int) -> tuple[int, int]:
        return max(floor[start : start + width]), min(roof[start : start + width])

    def room(start: int) -> int:
        return bounds(start)[1] - bounds(start)[0]

    start = max(range(len(floor) - width), key=lambda s: (room(s), -abs(s - middle)), default=0)
    if room(start) > 0.045 * top:
        ink = _ON_LIGHT if is_light(colour) else _ON_DARK
        centre = start + width / 2, sum(bounds(start)) / 2
        axes.text(*centre, label, ha="center", va="center", weight="bold", color=ink, size=size)


def _name_phases(axes: "Axes", steps: Timeline) -> None:
    if steps.microbatches > 1:
        axes.text(0.5, 1.07, _pieces(steps), transform=axes.transAxes, ha="center", color=MUTED)
        marks = _numbered(steps)
    else:
        marks = [(str(span.phase), span.first, span.end) for span in steps.spans]
    for name, first, end in marks:
        if end - first > 0.012 * (len(name) + 1) * len(steps.totals):  # wide enough for its name
            axes.axvline(first, color=MUTED, lw=0.7, ls=(0, (2, 2)), zorder=0)
            axes.text((first + end) / 2, 1.02, name, transform=axes.get_xaxis_transform(), ha="center", color=MUTED)


def _numbered(steps: Timeline) -> list[tuple[str, int, int]]:
    """Where each microbatch is, and the update; nothing if the columns are too few to tell them apart."""
    starts = [span.first for span in steps.spans if span.phase == Phase.FORWARD]
    if len(starts) != steps.microbatches:
        return []
    ends = [*starts[1:], next(span.first for span in steps.spans if span.phase == Phase.UPDATE)]
    passes = [(str(number), *place) for number, place in enumerate(zip(starts, ends, strict=True), 1)]
    return [*passes, ("update", ends[-1], len(steps.totals))]


def _mark_peak(axes: "Axes", steps: Timeline, peak: dict[str, Any], words: str = "", budget_bytes: int = 0) -> None:
    column, size = steps.peak_column, max(steps.totals)
    words = words or " ".join(filter(None, [format_bytes(size), peak["module"] and f"at {peak['module']}"]))
    side, shift = ("right", -8) if _is_late(steps) else ("left", 8)
    axes.plot(column, size, "o", color=INK, ms=5)
    place: Any = {"textcoords": "offset points", "ha": side, "weight": "bold", "bbox": HALO}
    above = budget_bytes if size <= budget_bytes < 1.08 * size else size  # its line would run through the words
    axes.annotate(words, (column, above), (shift, 5), **place)


def _is_late(steps: Timeline) -> bool:
    """Whether the peak is so far right that its words go to its left."""
    return steps.peak_column > 0.6 * len(steps.totals)


def changes(*lines: list[int]) -> list[int]:
    """The columns at which one of the lines takes another value, the first and the last: all that a step needs.

    >>> changes([1, 1, 2, 2, 2], [5, 5, 5, 6, 6])
    [0, 2, 3, 4]
    """
    points = list(zip(*lines, strict=True))
    ends = (0, len(points) - 1)
    return [column for column, point in enumerate(points) if column in ends or point != points[column - 1]]


def _outline(axes: "Axes", name: str, steps: Timeline, colour: str, top: int) -> None:
    """One of two runs: its total as a filled line, its name and peak written at the peak."""
    places = [column / len(steps.totals) for column in range(len(steps.totals))]
    axes.fill_between(places, steps.totals, step="post", color=colour, alpha=0.25, lw=0)
    axes.step(places, steps.totals, where="post", color=colour, lw=1.2)
    peak = places[steps.peak_column], steps.totals[steps.peak_column]
    axes.plot(*peak, "o", color=colour, ms=6)
    words = f"{name}: {format_bytes(peak[1])}".removeprefix(": ")
    if peak[1] < top:
        words += f", {top / peak[1]:.1f}x less"
    late = peak[0] > 0.6  # then the words go to its left, where there is room
    place: Any = {"xytext": (-8 if late else 8, 9), "textcoords": "offset points", "ha": "right" if late else "left"}
    axes.annotate(words, peak, **place, color=colour, weight="bold", bbox=HALO)


def _memory_axis(axes: "Axes", top: int) -> None:
    axes.set_ylim(0, top * 1.1)
    axes.yaxis.set_major_formatter(lambda size, _: round_bytes(size) if size else "0")
    axes.yaxis.grid(True, color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


# -- the parts of the peak --------------------------------------------------------------------------------
def _pie(axes: "Axes", data: dict[str, Any]) -> None:
    parts = in_order(data["by_category"])
    colours = [look(kind).colour for kind in parts]
    edge = {"width": 0.42, "edgecolor": "white", "linewidth": 1.2}
    axes.pie(list(parts.values()), colors=colours, startangle=90, counterclock=False, wedgeprops=edge)
    axes.text(0, 0.1, format_bytes(data["bytes"]["total"]), ha="center", va="center", size=12, weight="bold")
    axes.text(0, -0.16, "at the peak", ha="center", va="center", color=MUTED, size=8.5)


def _legend(axes: "Axes", kinds: list[str], data: dict[str, Any]) -> None:
    """The colours' names with bytes and shares, in columns."""
    parts, total = data["by_category"], data["bytes"]["total"]
    axes.set(xlim=(0, 1), ylim=(7, 0))
    axes.axis("off")
    for row, kind in enumerate(kinds):
        size = parts.get(kind, 0)
        axes.plot(0.06, row + 0.5, "s", color=look(kind).colour, ms=9)
        axes.text(0.11, row + 0.5, look(kind).label, va="center")
        axes.text(0.8, row + 0.5, format_bytes(size), va="center", ha="right")
        axes.text(0.97, row + 0.5, f"{size / total:.1%}", va="center", ha="right", color=MUTED)


def round_bytes(size: float) -> str:
    """A tick's bytes -> text without needless digits: "50 MB"."""
    value, unit = format_bytes(size).split(" ")
    return f"{float(value):g} {unit}"
