import json

import pytest


def test_both_runs_are_measured_and_compared(shoestring):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, "--microbatch", 2, "--steps", 1, "--json", "--threads", 1)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    plain, lean = found["baseline"], found["lean"]
    assert plain["settings"] == {} and lean["settings"] == {"microbatch": 2}
    assert found["memory_ratio"] == plain["measured_peak_bytes"] / lean["measured_peak_bytes"] > 1
    assert found["time_ratio"] == lean["seconds_per_step"] / plain["seconds_per_step"] > 0
    assert found["measured_peak_bytes"] == lean["measured_peak_bytes"]
    assert found["predicted_peak_bytes"] == lean["predicted_peak_bytes"]
    for row in (plain, lean):
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.02)


def test_a_budget_is_planned_for_and_a_users_task_is_measured_like_our_own(shoestring, user):
    model = user("""
def task():
    return make(model=nn.Sequential(*[nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)] * 3), batch=torch.zeros(4096, 4))
""")
    plain = json.loads(shoestring("bench", model, "--steps", 1, "--json").out)["baseline"]["measured_peak_bytes"]
    found = json.loads(shoestring("bench", model, "--budget", plain // 2, "--steps", 1, "--json").out)
    assert found["lean"]["settings"] and found["measured_peak_bytes"] <= plain // 2


def test_a_page_has_both_runs_and_the_ratios(shoestring):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, "--precision", "fp16", "--steps", 1)
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == ["baseline", "lean", lines[-1].split()[0]]
    assert lines[2] == "lean      precision fp16" and lines[-1].endswith("x the time")


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (("--budget", "lots"), 2, "'lots' is not a size"),
        (("--budget", "10KB", "--microbatch", 2), 3, "with microbatch 2 a step would need"),
        (("--activations", "adaptive"), 2, "activations adaptive needs a budget"),
        (("--budget", "1KB"), 3, "no plan of risk neutral fits 1.000 KB: the smallest peak is"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(shoestring, arguments, code, words):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, *arguments)
    assert answer.code == code and answer.out == ""
    assert answer.err.splitlines()[-1].startswith("shoestring: ") and words in answer.err.splitlines()[-1]
