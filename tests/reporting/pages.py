"""Run folders and a study's report for the tests of the page, made without training."""

import json
from html.parser import HTMLParser
from pathlib import Path

from shoestring.ledger import Category, Ledger, Phase
from shoestring.planning.plan import Plan
from shoestring.profiling import Profile
from shoestring.reporting.page import step_data, write_steps
from shoestring.runs.record import RunRecord

MB = 10**6
HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>&amp;\u2028{{data}}"
STORED = {
    "plain": [],
    "lean": [
        {"module": module, "operation": operation, "codec": codec, "exact_bytes": 40 * MB, "stored_bytes": size * MB}
        for module, operation, codec, size in (("first", "conv2d", "int4", 5), ("", "", "pool2", 10))
    ],
}
FIDELITY = {"task": "net", "layers": [{"module": "first", "codec": "int4", "cosine": 0.9987, "norm_ratio": 1.0}]}
STUDY = {
    "study": "table3",
    "scale": "small",
    "rows": [
        {
            "label": label,
            "settings": {"nonzero": nonzero, "precision": "fp16"},
            "paper": {"memory_mb": printed, "accuracy": accuracy, "interval": 0.1},
            "rules_bytes": printed * MB,
            "predicted_bytes": printed * MB,
            "measured_bytes": printed * MB,
            "quality": quality,
            "seeds": [0],
            "step_seconds": printed / 100 if quality else None,
        }
        for label, nonzero, printed, accuracy, quality in (
            ("middle", 30, 7, 94.0, {"accuracy": 81.0, "interval": 0.5, "values": [81.0]}),
            ("small", 10, 3, 92.0, {}),
            ("large", 100, 40, 94.4, {"accuracy": 82.5, "interval": None, "values": [82.5]}),
        )
    ],
    "claims": [{"claim": "it is as good", "paper": 0.0, "ours": -1.5, "interval": None, "verdict": "not confirmed"}],
}


def profile_of(ledger: Ledger) -> Profile:
    return Profile("net", {}, ledger, ledger.peak(), {}, ["what is done after each update"], [])


def long_ledger(storages: int = 3000) -> Ledger:
    """A step with many short-lived storages, and one moment in the middle that is higher than all others."""
    ledger = Ledger()
    ledger.birth(5 * MB, Category.MODEL, "fc", "parameter")
    for number in range(storages):
        size = 90 * MB if number == storages // 2 else 1000 + number % 7
        born = ledger.birth(size, Category.ACTIVATION, f"layer{number}", "mm", Phase.FORWARD)
        ledger.death(born)
    return ledger


def write_run(folder: Path, ledger: Ledger | None = None, updates: int = 4, **changes) -> Path:
    """A run folder with `updates` lines in its log; `changes` are those of its record."""
    folder.mkdir(parents=True)
    fields = {
        "task": "net",
        "settings": {"task": "net", "updates": 4, "seed": 0, "techniques": {"microbatch": 10}},
        "environment": {"torch": "2"},
        "budget_bytes": 250 * MB,
        "predicted_peak_bytes": 213 * MB,
        "predicted_bytes": {"model": 13 * MB, "activation": 200 * MB},
        "measured_peak_bytes": 214 * MB,
        "measured_peaks": [[1, 200 * MB], [2, 214 * MB]],
        "updates": updates,
        "seconds": 3.5,
        "quality_name": "accuracy",
        "quality": 55.0,
        "best_quality": 55.0,
        "best_update": updates,
        "finished": True,
    }
    (folder / "record.json").write_text(json.dumps(RunRecord(**fields | changes).to_json()))
    (folder / "plan.json").write_text(Plan(microbatch=10).to_json())
    lines = [{"update": n, "epoch": 1, "loss": 2.0 / n, "lr": 0.1} for n in range(1, updates + 1)]
    lines.append({"update": updates, "epoch": 1, "accuracy": 55.0})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "saves" / f"update-{updates:012}").mkdir(parents=True)
    if ledger is not None:
        write_steps(folder, {name: step_data(profile_of(ledger)) | {"stored": STORED[name]} for name in STORED})
    return folder


class Reader(HTMLParser):
    """What a browser's parser makes of a page: its elements, the text of each script, and what was left open."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])
