"""The data of a page -> one HTML file with its style, its script and its data inside."""

import html
import json
import math
from importlib.resources import files
from typing import Any

from ...errors import ShoestringError

MOST_BYTES = 2 * 10**6
_LONGEST = 4000  # characters of one text; a run folder may hold anything


def page_html(data: dict[str, Any]) -> str:
    """The data of a page -> its HTML; the data can be read back from the element `data`."""
    parts = files(__package__)
    page = (parts / "page.html").read_text("utf-8")
    values = {
        "title": html.escape(_cleaned(data["title"])),
        "style": (parts / "page.css").read_text("utf-8"),
        "script": "".join((parts / name).read_text("utf-8") for name in ("page.js", "charts.js", "sections.js")),
        "data": embedded(data),
    }
    before, *rest = page.split("{{")  # in one pass, so that nothing in a value is taken for a name
    for piece in rest:
        name, _, after = piece.partition("}}")
        before += values[name] + after
    if (size := len(before.encode())) > MOST_BYTES:
        raise ShoestringError(
            f"the page would have {size:,} bytes, over {MOST_BYTES:,}: report fewer runs at once, or the study's JSON"
        )
    return before


def embedded(data: Any) -> str:
    """Data -> JSON that is safe inside HTML: `<`, `&` and `>` are escaped."""
    text = json.dumps(_cleaned(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cleaned(value: Any) -> Any:
    """The same without what JSON cannot express (infinities, NaN), and with long texts cut."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
    if isinstance(value, dict):
        return {_cleaned(str(key)): _cleaned(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(part) for part in value]
    return value if value is None or isinstance(value, bool | int) else str(value)
