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
    found = json.loads(shoestring("bench", model, "--budget", "50%", "--steps", 1, "--json").out)
    plain = found["baseline"]["measured_peak_bytes"]
    assert found["lean"]["settings"] and found["measured_peak_bytes"] <= 0.52 * plain  # with the objects of both, half
    assert plain == pytest.approx(found["baseline"]["predicted_peak_bytes"], rel=0.02)


def test_a_page_has_both_runs_and_the_ratios(shoestring):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, "--precision", "fp16", "--steps", 1)
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[:3:2]] == ["baseline", "lean"] and "the batch, in both" in lines[4]
    assert lines[2] == "lean      precision fp16" and lines[-1].endswith("x the time")


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (("--budget", "lots"), 2, "'lots' is not a size"),
        (("--budget", "10KB", "--microbatch", 2), 3, "with microbatch 2 a step would need"),
        (("--activations", "adaptive"), 2, "activations adaptive needs a budget"),
        (("--budget", "1KB"), 3, "no plan of risk neutral fits 1.000 KB: the least that works is"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(shoestring, arguments, code, words):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, *arguments)
    assert answer.code == code and answer.out == ""
    assert answer.err.splitlines()[-1].startswith("shoestring: ") and words in answer.err.splitlines()[-1]


def test_a_users_model_is_inside_the_meter_and_fp16_is_measured_until_an_update_was_made(shoestring, user):
    model = user("""
def task(batch=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return make(model=model, batch=torch.randn(batch, 64), optimizer=SGD(lr=0.1, momentum=0.9))
""")
    for technique in (("--microbatch", 4), ("--precision", "fp16")):
        answer = shoestring("bench", model, *technique, "--steps", 1, "--threads", 1, "--json")
        assert answer.code == 0, answer.err
        found = json.loads(answer.out)
        assert found["task"]
        for row in (found["baseline"], found["lean"]):
            assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.02)


def test_there_must_be_something_to_compare(shoestring, user):
    answer = shoestring("bench", user("def task():\n    return make()"))
    assert answer.code == 2 and "there is nothing to compare: name techniques" in answer.err
