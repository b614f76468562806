"""A run of a model in shards: its saves are whole, and it is the same run whenever it is stopped."""

import pytest
import torch
from kills import remains
from processes import raised, run_in
from small import Noise, right_answers, task
from test_shared_runs import Stopping

from shoestring import Adam, Plan, apply, load_weights, train
from shoestring.distributed import whole

HOW = {"evaluation": right_answers(), "save_every": 2}
PLANS = {
    "shards": Plan(shard="fsdp"),
    "shards, checkpoint": Plan(shard="fsdp", checkpoint="residual-1", microbatch=2),
    "shards, 8 bits": Plan(shard="fsdp", precision="fp16", optimizer="8bit"),
    "shards, factored": Plan(shard="fsdp", precision="bf16", optimizer="sm3"),
    "replicas": Plan(),
}


def lean(plan):
    return apply(task(Adam()), PLANS[plan])


def runs(folder):
    """In each process: whole runs, runs that are stopped and resumed -> the final weights, and what was refused."""
    seen = {}
    for plan in PLANS:
        trained = lean(plan)
        record = train(trained, Noise(), run=f"{folder}/{plan}", epochs=3, **HOW)
        seen[plan] = record.quality, [whole(parameter).detach() for parameter in trained.model.parameters()]
        stopped = f"{folder}/{plan}-stopped"
        raised(lambda: train(lean(plan), Stopping(7), run=stopped, epochs=3, **HOW))  # noqa: B023
        train(lean(plan), Noise(), run=stopped, epochs=3, resume=True, **HOW)
    seen["averaging"] = raised(lambda: train(lean("shards"), Noise(), run=f"{folder}/mean", epochs=3, average=2))
    seen["other plan"] = raised(
        lambda: train(lean("replicas"), Noise(), run=f"{folder}/shards", epochs=3, resume=True, **HOW)
    )
    return seen


OTHERS = "shards", "shards, factored", "shards, 8 bits"


def resumed(folder):
    """The rest of runs that were begun in another number of processes -> what was refused."""
    how = HOW | {"epochs": 3, "resume": True}
    return [raised(lambda: train(lean(plan), Noise(), run=f"{folder}/other-{plan}", **how)) for plan in OTHERS]  # noqa: B023


def begun(folder):
    """Runs that end at the eighth batch -> what each raised."""
    how, until = HOW | {"epochs": 3}, Stopping(7, (0, 1, 2, 3))
    return [raised(lambda: train(lean(plan), until, run=f"{folder}/other-{plan}", **how)) for plan in OTHERS]  # noqa: B023


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    train(apply(task(Adam()), Plan()), Noise(), run=folder / "alone", epochs=1)  # late imports, before the forks
    return folder, run_in(2, runs, str(folder))


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_is_stopped_and_resumed_leaves_the_same_bytes(two, plan):
    folder, (zero, one) = two
    whole_run, stopped = remains(folder / plan), remains(folder / f"{plan}-stopped")
    assert whole_run.keys() == stopped.keys()
    assert not [name for name in whole_run if whole_run[name] != stopped[name]]
    assert zero[plan][0] == one[plan][0]


def test_a_save_holds_the_whole_model_and_ends_near_that_of_replicas(two):
    folder, (zero, _) = two
    model = task().model
    load_weights(model, folder / "shards" / "saves" / "update-0000000015")
    for tensor, sharded, replicated in zip(model.parameters(), zero["shards"][1], zero["replicas"][1], strict=True):
        assert torch.equal(tensor.detach(), sharded)
        torch.testing.assert_close(sharded, replicated, rtol=1e-3, atol=1e-4)


def test_what_shards_cannot_do_is_refused(two):
    _, (zero, one) = two
    for name, words in {"averaging": "out averaging", "other plan": "techniques"}.items():
        assert words in zero[name][1] and words in one[name][1], name


def test_a_run_goes_on_in_another_number_of_processes(two):
    folder, _ = two
    assert run_in(4, begun, str(folder)) == 4 * [3 * [("Stopped", "")]]
    for *passed, refused in run_in(2, resumed, str(folder)):
        assert passed == [("", "")] * 2
        assert "for the shards of 4 processes, and there are 2 now" in refused[1], "its blocks are those of four"
    for plan in OTHERS[:2]:
        assert '"before": 4' in (folder / f"other-{plan}" / "log.jsonl").read_text()
        assert (folder / f"other-{plan}" / "saves" / "update-0000000015").is_dir()
