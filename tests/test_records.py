"""JSON files of ours: whatever is in one, it is a record of the declared types, or refused by the key that is wrong."""

import copy
import json
import random

import pytest

from shoestring import Plan, ShoestringError
from shoestring.records import MOST_CHARACTERS, matches, read_object
from shoestring.runs.record import RunRecord, read_record

PLAN = Plan(
    nonzero={"nonzero": 30, "method": "set"}, microbatch=10, task="net", budget_bytes=7_000_000,
    predicted_bytes={"model": 3}, predicted_time_ratio=1.5, reasons=("why",),
    alternatives=({"settings": {}, "risk": "exact", "predicted_peak_bytes": 1, "predicted_time_ratio": 1.0},),
)  # fmt: skip
RECORD = RunRecord("net", {"seed": 0}, {"torch": "2"}, 7, 6, {"model": 3}, measured_peaks=[[0, 5]], quality=1.5)
DEEP = "[" * 100_000 + "]" * 100_000
ODD = [None, True, -1, 1.5, float("nan"), float("inf"), 10**400, "", "x" * 200, [], [[]], {}, {"a": {}}, [None], 2**63]


def read_plan(text):
    return Plan.from_json(text)


def reading_record(path):
    def read(text):
        path.write_text(text)
        return read_record(path)

    return read


@pytest.mark.parametrize("text", ["", "[]", "3", "{", DEEP, '{"version": ' + DEEP + "}", "nul", '{"a": 1}', "\ud800"])
def test_what_is_no_record_is_refused_in_one_line(text, tmp_path):
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    for read in (read_plan, reading_record(tmp_path / "record.json")):
        with pytest.raises(ShoestringError) as told:
            read(text)
        assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_a_file_of_a_gigabyte_is_not_parsed():
    with pytest.raises(ValueError, match="at most"):
        read_object(b" " * (MOST_CHARACTERS + 1))


@pytest.mark.parametrize("key, value, words", [
    ("budget_bytes", "7MB", "budget_bytes is \"7MB\", not int | None"),
    ("budget_bytes", True, "budget_bytes is true"),
    ("budget_bytes", -1, "budget_bytes is -1, and bytes are counted from 0 on"),
    ("predicted_time_ratio", float("nan"), "predicted_time_ratio is nan, and a ratio is a finite number from 0 on"),
    ("predicted_time_ratio", -2, "predicted_time_ratio is -2"),
    ("version", "1", "the plan has version '1', this Shoestring reads 1"),
    ("predicted_bytes", {"model": "much"}, "predicted_bytes is dict, not dict[str, int]"),
    ("reasons", "why", "reasons is \"why\""),
    ("alternatives", [3], "alternatives is list"),
    ("microbatch", 10**400, "microbatch is 1000"),
    ("nonzero", float("nan"), "nonzero is nan, which is not a percentage"),
])  # fmt: skip
def test_the_key_that_is_wrong_is_named(key, value, words):
    record = json.loads(PLAN.to_json()) | {key: value}
    with pytest.raises(ShoestringError) as told:
        read_plan(json.dumps(record))
    assert words in str(told.value)


def test_records_that_were_damaged_at_random_are_read_or_refused_and_nothing_else(tmp_path):
    """2,000 of each: a value, at any depth, is replaced by an odd one, removed, or put under another key."""
    draw = random.Random(0)
    reading = {read_plan: json.loads(PLAN.to_json()), reading_record(tmp_path / "record.json"): RECORD.to_json()}
    for read, good in reading.items():
        assert read(json.dumps(good)) is not None
        for _ in range(2000):
            record = copy.deepcopy(good)
            damage(record, draw)
            try:
                found = read(json.dumps(record))
            except ShoestringError as error:
                assert "\n" not in str(error)
            else:
                str(found)  # a plan that was read can be shown


def damage(record, draw):
    """Damages something inside a record, in place."""
    key = draw.choice(list(record) if isinstance(record, dict) else range(len(record)))
    if isinstance(record[key], dict | list) and record[key] and draw.random() < 0.6:
        return damage(record[key], draw)
    what = draw.randrange(3)
    if what == 0 or isinstance(record, list):
        record[key] = draw.choice(ODD)
    elif what == 1:
        del record[key]
    else:
        record[draw.choice(["other", "", "version", "microbatch"])] = record.pop(key)


def test_an_int_stands_for_a_float_and_a_bool_for_neither():
    assert matches(1, float) and not matches(True, int) and not matches(True, float) and not matches(1.0, int)
