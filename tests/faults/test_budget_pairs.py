"""Small models, in which what a library holds for a moment counts, keep to what was predicted for them."""

import json
import subprocess
import sys

import budget_pairs
import pytest

import shoestring
from shoestring import Plan
from shoestring.measuring.heap import is_preloaded, preload_environment

PERCEPTRON = {"kind": "perceptron", "width": 128, "depth": 8, "shape": [128], "size": 8, "adam": False}
ENCODER = {"kind": "encoder", "width": 64, "depth": 1, "shape": [12], "size": 20, "adam": True}
RECURRENT = {"kind": "recurrent", "width": 32, "depth": 1, "shape": [12], "size": 8, "adam": False}
FOUND = {
    "oneDNN's recurrent layer": (RECURRENT, {}),
    "masks are drawn in the trace of apply": (ENCODER, {"precision": "fp16", "optimizer": "8bit", "microbatch": 5}),
    "positions are drawn": (PERCEPTRON, {"nonzero": 30, "optimizer": "8bit+no-gradient", "microbatch": 4}),
}  # of 200 pairs drawn at random, those that were over their budgets


@pytest.fixture(scope="module")
def rows():
    """What each needs and takes, from one process with the meter."""
    done = subprocess.run([sys.executable, __file__], env=preload_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FOUND)
def test_the_heap_keeps_to_the_prediction(rows, name):
    needed, taken = rows[name]
    assert 0.8 * needed < taken <= needed


def needed_and_taken(words, settings):
    model = words | {"kind": getattr(budget_pairs, words["kind"]), "shape": tuple(words["shape"])}
    task, plan = budget_pairs.task_of(**model), Plan(**settings)
    needed = shoestring.profile(shoestring.apply(budget_pairs.task_of(**model), plan).task).needed_bytes
    return needed, budget_pairs.heap(model, plan, task.batch)


if __name__ == "__main__":
    assert is_preloaded()
    print(json.dumps({name: needed_and_taken(*pair) for name, pair in FOUND.items()}))
