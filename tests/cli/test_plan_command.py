"""`shoestring plan`: a plan in words, as data and as a file that `train` follows; refusals in one line."""

import json

import pytest

NET = """
def task(batch=32):
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return make(model=model, batch=torch.zeros(batch, 4), optimizer=SGD(lr=0.1, momentum=0.9))
"""


def test_a_plan_says_what_it_does_and_why(shoestring, user):
    answer = shoestring("plan", user(NET), "--batch", 256, "--budget", "200KB")
    assert answer.code == 0, answer.err
    assert "of Python objects = " in answer.out and " of 200.0 KB, " in answer.out
    assert "plain training needs" in answer.out and "without it about" in answer.out
    assert "Trade-offs found (memory against time); * = chosen" in answer.out
    assert max(map(len, answer.out.splitlines())) > 100  # what is piped is not wrapped


def test_without_a_budget_the_trade_offs_are_told(shoestring, user):
    answer = shoestring("plan", user(NET), "--batch", 256)
    assert answer.code == 0 and "the least budget that works at risk neutral is" in answer.out
    found = json.loads(shoestring("plan", user(NET), "--batch", 256, "--budget", "60%", "--json").out)
    assert found["budget_bytes"] < found["predicted_peak_bytes"] * 10 and found["object_bytes"] > 0


def test_a_budget_for_the_whole_process_leaves_out_what_python_and_torch_take(shoestring, user, monkeypatch):
    from shoestring.measuring import base

    monkeypatch.setattr(base, "process_base_bytes", lambda: 300_000_000)
    words = ("plan", user(NET), "--batch", 256, "--counting", "process", "--json", "--budget")
    answer = shoestring(*words, "301MB")
    assert json.loads(answer.out)["budget_bytes"] == 1_000_000 and "300 MB are for Python and torch" in answer.err
    refused = shoestring(*words, "250MB")
    assert refused.code == 3 and "needs 300 MB for Python, torch and planning alone" in refused.err
    assert shoestring(*words, "50%").code == 2


def test_json_is_the_plan_and_the_file_is_the_same(shoestring, user, tmp_path):
    path = tmp_path / "plan.json"
    answer = shoestring("plan", user(NET), "--batch", 256, "--budget", "200KB", "--output", path, "--json")
    found = json.loads(answer.out)
    assert found == json.loads(path.read_text()) and found["predicted_peak_bytes"] <= 198_000
    assert {row["risk"] for row in found["alternatives"]} <= {"exact", "neutral", "approximate"}


def test_a_plan_on_data_is_what_train_follows(shoestring, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = ("--batch", 50, "--data", "none")
    assert "the data folder none does not exist" in shoestring("plan", "wrn-10-0.1", *size, "--budget", "4MB").err
    (tmp_path / "plan.json").write_text('{"version": 1, "task": "wrn-10-0.1", "microbatch": 25}')
    answer = shoestring(
        "train", "wrn-10-0.1", "--batch", 50, "--updates", 1, "--threads", 1, "--plan", "plan.json", "--json"
    )
    assert json.loads(answer.out)["settings"]["techniques"] == {"microbatch": 25}


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (("--budget", "10B"), 3, "no plan of risk neutral fits 10 B: the least that works is"),
        (("--budget", "lots"), 2, "'lots' is not a size in bytes"),
        (("--budget", "7"), 2, "write the unit, as in 7MB"),
        (("--budget", "1MB", "--risk", "some"), 2, "invalid choice: 'some'"),
        (("--budget", "1MB", "--output", "plan.txt"), 2, "must end in .json"),
        (("--budget", "1MB", "--output", "nowhere/plan.json"), 2, "there is no folder 'nowhere'"),
    ],
)
def test_a_mistake_is_told_in_one_line(shoestring, user, arguments, code, words):
    answer = shoestring("plan", user(NET), *arguments)
    assert answer.code == code and answer.out == "" and words in answer.err.splitlines()[-1]
    assert "Traceback" not in answer.err


def test_what_was_left_out_is_told_to_who_asks(shoestring, user):
    model = user(NET.replace("optimizer=SGD(lr=0.1, momentum=0.9)", "optimizer=lambda p: torch.optim.RMSprop(p)"))
    size = ("--batch", 256, "--budget", "200KB")
    told = shoestring("plan", model, *size, "--explain")
    assert told.code == 0, told.err
    assert "left out:" in told.out and "the lean form of RMSprop is not known" in " ".join(told.out.split())
    assert "left out:" not in shoestring("plan", model, *size).out


def test_a_plan_is_rehearsed_where_that_is_asked_for(shoestring, user, monkeypatch):
    from shoestring.planning import search

    rehearsed = []
    monkeypatch.setattr(search, "rehearse", lambda task, settings: rehearsed.append(settings))
    size = (user(NET), "--batch", 256, "--budget", "200KB")
    assert shoestring("plan", *size).code == 0 and rehearsed == []
    assert shoestring("plan", *size, "--rehearse").code == 0 and len(rehearsed) == 1
