"""What a plan says about quality is what the recorded runs gave."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, Task
from shoestring.studies.results import Estimate
from shoestring.techniques.activations import COMPRESSED, evidence
from shoestring.techniques.evidence import LONGER, SHORT, WHERE
from shoestring.techniques.registry import REGISTRY
from shoestring.techniques.technique import Risk

RESULT = Path(__file__).parents[2] / "docs" / "results" / "neutral.small.json"


def task():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())
    return Task(net, lambda model, batch: model(batch).square().mean(), torch.randn(20, 3, 8, 8), SGD(lr=0.1))


@pytest.fixture(scope="module")
def rows():
    return {row["label"]: row for row in json.loads(RESULT.read_text())["rows"]}


@pytest.mark.parametrize("label", SHORT)
def test_the_evidence_is_what_the_recorded_runs_gave(rows, label):
    mine, plain = (rows[name]["quality"] for name in (label, "FP32"))
    difference = mine["accuracy"] - plain["accuracy"]
    margin = (mine["interval"] ** 2 + plain["interval"] ** 2) ** 0.5
    assert SHORT[label][:2] == (pytest.approx(difference, abs=0.005), pytest.approx(margin, abs=0.005))


@pytest.mark.parametrize(
    ("label", "row", "plain"),
    [("FP16", "100% FP16", "100% FP32"), ("BF16", "100% BF16", "100% FP32"), ("microbatch 10", "10", "100"),
     ("8-bit state", "100% FP32, 8-bit momentum", "100% FP32")],
)  # fmt: skip
def test_the_longer_runs_are_those_of_the_study_that_is_named(label, row, plain):
    file = RESULT.parent / f"{SHORT[label].study}.small.json"
    rows = {row["label"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(rows[row]["seeds"]) == 1 and "a single seed" in LONGER
    difference = rows[row]["quality"]["accuracy"] - rows[plain]["quality"]["accuracy"]
    assert SHORT[label].longer == pytest.approx(difference, abs=0.006)
    assert file.with_suffix(".md").name in str(SHORT[label])


@pytest.mark.parametrize(
    ("technique", "value", "label"),
    [("precision", "fp16", "FP16"), ("precision", "bf16", "BF16"), ("optimizer", "8bit", "8-bit state"),
     ("microbatch", 10, "microbatch 10")],
)  # fmt: skip
def test_what_is_called_neutral_lost_less_than_a_point_and_nothing_that_is_significant(technique, value, label):
    found = SHORT[label]
    neutral = found.points > -1.0 and found.points + found.margin >= 0
    assert REGISTRY[technique].risk(task(), value) == (Risk.NEUTRAL if neutral else Risk.APPROXIMATE)


def test_the_evidence_names_the_runs_as_they_were(rows):
    found = json.loads(RESULT.read_text())
    assert all(len(row["seeds"]) == 3 for row in rows.values())
    assert {(one["model"], one["epochs"]) for one in found["trials"]} == {("wrn-16-1", 3)}
    assert "3 epochs, 3 seeds" in WHERE and (RESULT.parents[2] / WHERE.split(": ")[1]).exists()


def test_every_value_that_changes_numbers_says_what_is_known_about_quality():
    mine, told = task(), 0
    for name, technique in REGISTRY.items():
        for value in technique.options(mine.with_(devices=2) if name == "shard" else mine):
            if technique.risk(mine, value) > Risk.EXACT:
                assert technique.evidence(mine, value), value
                told += 1
    assert told > 10


@pytest.mark.parametrize(("optimizer", "form"), [(Adam(), "8bit"), (Adam(), "bf16"), (SGD(momentum=0.9), "bf16")])
def test_a_state_that_was_never_trained_is_not_said_to_be(optimizer, form):
    told = REGISTRY["optimizer"].evidence(task().with_(optimizer=optimizer), form)
    assert told.startswith(f"no run of ours has {type(optimizer).__name__}'s state in {form}")
    assert REGISTRY["optimizer"].evidence(task(), "8bit").startswith("SGD's momentum in 8 bits")


@pytest.mark.parametrize("codec", [word for word, offer in COMPRESSED.items() if offer.points is not None])
def test_the_points_of_a_codec_are_those_of_its_study(codec):
    rows = json.loads((RESULT.parent / "accuracy-compressed.small.json").read_text())["rows"]
    trained = {row["label"]: Estimate.of(row["quality"]["values"]) for row in rows if row["quality"]}
    offer, found = COMPRESSED[codec], trained[codec].minus(trained["uncompressed"])
    assert found.count == 3 and "three runs" in evidence(None, codec)
    assert (offer.points, offer.margin) == pytest.approx((found.value, found.interval), abs=0.006)
    assert f"{offer.points:+.1f} ± {offer.margin:.1f} points" in evidence(None, codec)
