import json

import pytest
import torch


def test_all_runs_are_measured_and_compared_with_the_faster_eager_layout(shoestring):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, "--microbatch", 2, "--steps", 1, "--json", "--threads", 1)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    plain, last, lean = (found[name] for name in found["runs"])
    assert found["runs"] == ["baseline", "channels_last", "lean"]
    assert plain["settings"] == last["settings"] == {} and lean["settings"] == {"microbatch": 2}
    best = min(plain, last, key=lambda row: row["seconds_per_step"])
    assert found[found["best_eager"]] == best
    assert found["memory_ratio"] == best["measured_peak_bytes"] / lean["measured_peak_bytes"] > 1
    assert found["time_ratio"] == lean["seconds_per_step"] / best["seconds_per_step"] > 0
    assert last["measured_peak_bytes"] == pytest.approx(plain["measured_peak_bytes"], rel=0.3)
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
    assert found["runs"] == ["baseline", "lean"] and found["best_eager"] == "baseline"  # no maps, no other layout
    plain = found["baseline"]["measured_peak_bytes"]
    assert found["lean"]["settings"] and found["measured_peak_bytes"] <= 0.52 * plain  # with the objects of both, half
    assert plain == pytest.approx(found["baseline"]["predicted_peak_bytes"], rel=0.02)


def test_a_page_has_all_runs_and_the_ratios(shoestring):
    answer = shoestring("bench", "wrn-10-0.5", "--batch", 4, "--precision", "fp16", "--steps", 1)
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[:6:2]] == ["baseline", "channels_last", "lean"]
    assert "the batch, in all" in lines[6]
    assert lines[2].endswith("plain PyTorch, channels_last") and lines[4] == "lean          precision fp16"
    assert all("s per step" in line for line in lines[1:6:2]) and "x the time" in lines[-1]


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


def test_a_step_in_channels_last_runs_on_maps_of_that_layout():
    from shoestring import Plan, builtin
    from shoestring.cli.baselines import baselines
    from shoestring.cli.bench import build

    task = builtin("wrn-10-0.5", device="meta", batch=2)
    way = baselines(task.model, False)["channels_last"]
    lean, seen = build(task, Plan(), way), []
    for module in lean.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, out: seen.append(out))
    lean.step(way.lay_out(task.batch))
    assert seen and all(out.is_contiguous(memory_format=torch.channels_last) for out in seen)


@pytest.mark.slow
def test_a_compiled_run_is_shown_if_asked_for_and_is_not_an_eager_one(shoestring, user):
    model = user("""
def task(batch=64):
    return make(model=nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), batch=torch.randn(batch, 64))
""")
    answer = shoestring("bench", model, "--microbatch", 8, "--steps", 1, "--compile", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["runs"] == ["baseline", "compiled", "lean"] and found["best_eager"] == "baseline"
    plain, compiled = found["baseline"]["measured_peak_bytes"], found["compiled"]["measured_peak_bytes"]
    assert 0.5 * plain < compiled < 1.5 * plain and found["compiled"]["seconds_per_step"] > 0
