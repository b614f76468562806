import json

import pytest

SMALL = ("fidelity", "wrn-10-0.5", "--batch", 16, "--steps", 2, "--every", 1, "--codecs", "int4,pool2", "--threads", 1)


def test_layers_and_the_whole_are_told_for_every_codec(shoestring, tmp_path):
    figure = tmp_path / "fidelity.svg"
    answer = shoestring(*SMALL, "--json", "--figure", figure)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["steps"] == 2 and len(found["probes"]) == 2
    assert [row["codec"] for row in found["whole"]] == ["int4", "pool2"]
    layers = {(row["module"], row["codec"]): row for row in found["layers"]}
    assert layers["blocks.0.conv1", "int4"]["cosine"] > 0.98 > layers["blocks.0.conv1", "pool2"]["cosine"]
    assert all(row["stored_bytes"] < row["exact_bytes"] for row in found["whole"])
    assert all(row["peak_bytes"] > 0 for row in found["whole"])
    assert figure.read_text().startswith("<?xml")
    assert f"wrote {figure}" in answer.err


def test_a_users_model_is_compared_on_its_own_batch_and_shown_as_a_table(shoestring, user):
    model = user("""
def task():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return make(model=model, batch=torch.randn(64, 16, 16))
""")
    answer = shoestring("fidelity", model, "--steps", 1, "--codecs", "int8,int2")
    assert answer.code == 0, answer.err
    head, columns, layer, whole, *_ = answer.out.splitlines()
    assert head == "mine.py:task: gradients of 1 of 1 steps, compressed against exact: cosine, norm ratio"
    assert columns.split() == ["layer", "input", "int8", "int2"]
    assert layer.split()[0] == "2" and 0.99 < float(layer.split()[3]) <= 1
    assert whole.startswith("whole gradient")


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (("wrn-10-0.5", "--codecs", "int3"), 2, "there is no codec 'int3' that compresses: use poolK, int8"),
        (("wrn-10-0.5", "--codecs", "half"), 2, "there is no codec 'half' that compresses"),
        (("wrn-10-0.5", "--codecs", ""), 2, "there is no codec '' that compresses"),
        (("wrn-10-0.5", "--steps", 0), 2, "0 is out of range: it must be from 1"),
        (("wrn-10-0.5", "--every", 0), 2, "0 is out of range"),
        (("wrn-10-0.5", "--batch", 1, "--codecs", "pool64"), 2, "for its backward pass has 65.54 KB, the least"),
        (("wrn-10-0.5", "--data", "/nowhere"), 2, "nowhere"),
        (("wrn-10-0.5", "--figure", "x.gif"), 2, "must end in .svg"),
        (("nothing",), 2, "there is no built-in model 'nothing'"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(shoestring, arguments, code, words):
    answer = shoestring("fidelity", *arguments)
    assert answer.code == code, answer
    assert words in answer.complaint


def test_a_codec_that_changes_nothing_is_left_out_and_said(shoestring):
    answer = shoestring(*SMALL[:-4], "--codecs", "pool64,int4", "--json")
    assert "shoestring: pool64 is left out: " in answer.err
    assert [row["codec"] for row in json.loads(answer.out)["whole"]] == ["int4"]


def test_help_has_examples(shoestring):
    assert "shoestring fidelity wrn-28-2 --batch 100 --data" in shoestring("fidelity", "--help").out
