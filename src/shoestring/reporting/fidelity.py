"""The fidelity of codecs in words and pictures: a row per layer, a column per codec.

`data` is the JSON of `shoestring fidelity`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..units import format_bytes
from .figures import figure_file
from .palette import FAINT, INK, MUTED, is_light

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, BYTES, CELL = (20, 48), 10, 13  # widths of columns; names from and up to
LINES = ("#27588c", "#b5482c", "#0b7a75", "#f2b652", "#5b97c9", "#7d7468", "#a9a396")  # one after another by codec
FLOOR = 0.8  # the heat map's palest colour: below, a gradient points elsewhere


def show_fidelity(console: Console, data: dict[str, Any]) -> None:
    """Prints the table of layers and the line of the whole gradient."""
    for line in fidelity_lines(data):
        console.print(line, soft_wrap=True)


def fidelity_lines(data: dict[str, Any]) -> Iterator[str]:
    """The page, line by line: per layer and codec the cosine of both gradients and the ratio of their norms."""
    codecs, cells = codecs_of(data), cells_of(data)
    count, width = len(data["probes"]), max(NAME[0], min(NAME[1], 1 + max(map(len, modules_of(data)), default=0)))

    def row(name: str, size: str, cells: list[str]) -> str:
        name = name if len(name) < width else f"...{name[4 - width :]}"  # the end distinguishes layers
        return f"{name:<{width}}{size:>{BYTES}}{''.join(f'{cell:>{CELL}}' for cell in cells)}".rstrip()

    yield f"{data['task']}: gradients of {count} of {data['steps']} steps, compressed against exact: cosine, norm ratio"
    yield row("layer", "input", codecs)
    for module in modules_of(data):
        found = [cells[module, codec] for codec in codecs]
        words = [f"{one['cosine']:.4f} {one['norm_ratio']:5.2f}" for one in found]
        yield row(module, format_bytes(found[0]["exact_bytes"]), words)
    whole = {row["codec"]: row for row in data["whole"]}
    yield row("whole gradient", "", [f"{whole[codec]['cosine']:.4f}{'':6}" for codec in codecs])
    exact = data["whole"][0]["exact_bytes"]
    shares = [f"{whole[codec]['stored_bytes'] / max(1, exact):.1%}" for codec in codecs]
    yield row("all that is saved", format_bytes(exact), shares)
    yield row("peak of a step", "", [format_bytes(whole[codec]["peak_bytes"]) for codec in codecs])


def codecs_of(data: dict[str, Any]) -> list[str]:
    return [row["codec"] for row in data["whole"]]


def modules_of(data: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["module"] for row in data["layers"]))


def cells_of(data: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["module"], row["codec"]): row for row in data["layers"]}


# -- the figure -------------------------------------------------------------------------------------------------
def fidelity_figure(path: str | Path, data: dict[str, Any]) -> None:
    """The cosine of each layer and codec as a heat map, beside the whole gradient's over the steps."""
    modules, codecs = modules_of(data), codecs_of(data)
    names = 0.4 + 0.07 * max(map(len, modules), default=0)  # inches that the longest name takes
    wide, high = 0.75 * len(codecs), max(2.4, 0.24 * len(modules))
    width, height = names + wide + 5.4, high + 1.1
    with figure_file(path, width, height) as figure:
        bottom = 0.45 / height
        figure.text(0.1 / width, 1 - 0.3 / height, data["task"], size=13, weight="bold")
        _heat_map(figure.add_axes((names / width, bottom, wide / width, high / height)), data)
        _over_steps(figure.add_axes(((names + wide + 0.8) / width, bottom, 3.2 / width, high / height)), data)


def _heat_map(axes: "Axes", data: dict[str, Any]) -> None:
    """A cell per layer and codec: the darker the nearer to the exact gradient, with the cosine in it."""
    modules, codecs, cells = modules_of(data), codecs_of(data), cells_of(data)
    for row, module in enumerate(modules):
        for column, codec in enumerate(codecs):
            cosine = cells[module, codec]["cosine"]
            colour = _shade(cosine)
            axes.fill_between([column, column + 1], row, row + 1, color=colour, lw=0)
            ink = INK if is_light(colour) else "white"
            axes.text(column + 0.5, row + 0.5, f"{cosine:.3f}", ha="center", va="center", size=7.5, color=ink)
    axes.set(xlim=(0, len(codecs)), ylim=(max(1, len(modules)), 0))
    axes.set_xticks([column + 0.5 for column in range(len(codecs))], codecs, color=INK)
    axes.set_yticks([row + 0.5 for row in range(len(modules))], modules, color=INK)
    axes.set_title("cosine with the exact weight gradient", loc="left", size=10, weight="bold")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _shade(cosine: float) -> str:
    """From white, at FLOOR and below, to dark blue at 1; by squares, for most of what matters is near 1."""
    share = max(0.0, (min(1.0, cosine) - FLOOR) / (1 - FLOOR)) ** 2
    ends = ((255, 39), (255, 88), (255, 140))
    return "#" + "".join(f"{round(pale + share * (dark - pale)):02x}" for pale, dark in ends)


def _over_steps(axes: "Axes", data: dict[str, Any]) -> None:
    """A line per codec: the whole gradient's cosine at each probed step."""
    from matplotlib.ticker import MaxNLocator

    steps = [probe["step"] for probe in data["probes"]]
    for number, codec in enumerate(codecs_of(data)):
        values, colour = [probe["cosines"][codec] for probe in data["probes"]], LINES[number % len(LINES)]
        axes.plot(steps, values, "o-", color=colour, ms=4, lw=1.4, label=codec)
    axes.set(xlabel="updates before")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("whole gradient, over steps", loc="left", size=10, weight="bold")
    axes.yaxis.grid(True, color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=MUTED)
