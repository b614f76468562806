"""The planner finds what trying everything would find, spends exactness first, and says why."""

import contextlib
import random
import sys
from pathlib import Path

import pytest

from shoestring import Plan, ShoestringError, apply
from shoestring.errors import NoPlanFits
from shoestring.planning.options import Option
from shoestring.planning.search import Search, plan
from shoestring.profiling import profile
from shoestring.profiling.objects import NODE_BYTES, ONCE_BYTES, STORAGE_BYTES
from shoestring.rates import Rates
from shoestring.techniques.technique import Risk
from shoestring.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import small

import zoo

RATES = Rates(1e11, 8e10, 1e10, 1e-5)  # fixed, so that no timing decides a test


def traced_peak(task, settings):
    return profile(apply(task, Plan(**settings)).task).peak_bytes


def little():
    """Batch norm, blocks and linear layers, whose step is traced in a moment."""
    return small.task().with_(batch=small.Noise(size=160).read(0, 0))


PLAIN = profile(little()).peak_bytes


@pytest.fixture(scope="module")
def net():
    return little()


def test_where_plain_training_fits_it_is_left_as_it_is(net):
    assert plan(net, "1GB", rates=RATES).techniques() == {}


@pytest.mark.parametrize(
    "share, risk",
    [
        (0.7, Risk.EXACT),
        (0.5, Risk.EXACT),
        pytest.param(0.4, Risk.NEUTRAL, marks=pytest.mark.slow),
        pytest.param(0.2, Risk.NEUTRAL, marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_what_trying_everything_finds(share, risk):
    budget, fitting = round(share * PLAIN), []
    search = Search(little(), budget, RATES)
    for level in Risk:
        for number, option in enumerate(search.candidates.at(level) if level <= risk else []):
            seconds = search.seconds(option)
            if seconds is not None and (traced := search.traces.of(option.settings)) and search.has_room(traced):
                degree = search.candidates.roughness(option)
                fitting.append((level, degree, seconds, len(option.settings), number, option.settings))
    if not fitting:
        with pytest.raises(NoPlanFits):
            plan(little(), budget, risk=risk.name.lower(), rates=RATES)
        return
    found = plan(little(), budget, risk=risk.name.lower(), rates=RATES)
    assert found.techniques() == dict(min(fitting)[-1])
    assert found.predicted_peak_bytes == traced_peak(little(), found.techniques()) <= 0.99 * budget


@pytest.mark.parametrize("make", [little, zoo.lstm], ids=["convolutions", "lstm"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"microbatch": 5}, {"microbatch": 7, "optimizer": "8bit"}, {"microbatch": 3, "precision": "fp16"}],
    ids=str,
)
def test_a_brief_trace_has_the_peak_of_whole_steps(make, settings):
    task = apply(make(), Plan(**settings)).task
    assert profile(task, brief=True).peak_bytes == pytest.approx(profile(task).peak_bytes, rel=1e-3)


def test_a_lower_budget_never_yields_a_higher_peak():
    peaks = []
    for share in range(100, 0, -20):
        try:
            peaks.append(plan(little(), PLAIN * share // 100, risk="approximate", rates=RATES).predicted_peak_bytes)
        except NoPlanFits:
            break
    assert len(peaks) > 3 and peaks == sorted(peaks, reverse=True)


def test_every_setting_has_its_reason_and_the_alternatives_are_a_front(net):
    found = plan(net, PLAIN // 2, rates=RATES)
    for name in found.techniques():
        assert any(reason.startswith(name) for reason in found.reasons)
    by_memory = sorted(found.alternatives, key=lambda row: row["predicted_peak_bytes"])
    exact = [row["predicted_time_ratio"] for row in by_memory if row["risk"] == "exact"]
    assert exact == sorted(exact, reverse=True)


def test_what_does_not_fit_is_told_with_the_smallest_peak_and_what_fills_it(net):
    with pytest.raises(NoPlanFits, match=r"least that works is .* filled by .*; no higher risk would fit"):
        plan(net, "10KB", risk="exact", rates=RATES)


@pytest.mark.parametrize("budget", ["lots", "-3MB", "0"])
def test_a_budget_of_nonsense_is_refused(net, budget):
    with pytest.raises(ShoestringError, match=budget):
        plan(net, budget)


def test_a_risk_that_does_not_exist_is_refused(net):
    with pytest.raises(ShoestringError, match="exact, neutral or approximate"):
        plan(net, "1GB", risk="some")


def test_planning_leaves_the_model_as_it_was(net):
    before = {name: (p.dtype, p.device, p.shape) for name, p in net.model.named_parameters()}
    plan(net, PLAIN // 2, rates=RATES)
    assert {name: (p.dtype, p.device, p.shape) for name, p in net.model.named_parameters()} == before


def test_a_plan_survives_its_file():
    made = Plan(checkpoint="residual-2*", microbatch=10, reasons=("because",), budget_bytes=7)
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "nonsense": 2}'])
def test_a_damaged_plan_is_refused(text):
    with pytest.raises(ShoestringError):
        Plan.from_json(text)


def test_an_option_without_a_setting_is_smaller():
    option = Option((("checkpoint", "no-bn"), ("microbatch", 2)), Risk.EXACT)
    assert option.without("microbatch").settings == (("checkpoint", "no-bn"),)


def test_a_plan_that_changes_numbers_says_what_that_may_cost():
    search = Search(little(), PLAIN, RATES)
    sparse = search.finish(Option((("nonzero", 30),), Risk.NEUTRAL)).reasons
    assert any(reason.startswith("nonzero: ") and "points of accuracy" in reason for reason in sparse)
    exact = search.finish(Option((("checkpoint", "no-bn"),), Risk.EXACT)).reasons
    assert not any("points" in reason for reason in exact)
    assert any("a smaller budget may need a plan of risk neutral" in reason for reason in exact)


def test_a_plan_leaves_room_for_the_objects_around_its_tensors():
    traced = Search(little(), 0, RATES).traces.of(())
    alive = len(traced.ledger.live_at(traced.ledger.peak().time))
    needed = traced.peak_bytes + STORAGE_BYTES * alive + NODE_BYTES * traced.nodes + ONCE_BYTES
    assert alive > 20 and traced.nodes > 20
    assert Search(little(), needed, RATES).has_room(traced)
    assert not Search(little(), needed - 1, RATES).has_room(traced)


def test_what_is_offloaded_takes_no_memory_but_its_part_of_the_graph_does():
    search = Search(zoo.gpt(), 0, RATES)
    plain, offloaded = (search.traces.of(settings) for settings in ((), (("activations", "offload"),)))
    storages = [len(traced.ledger.live_at(traced.peak.time)) for traced in (plain, offloaded)]
    assert storages[1] < storages[0]
    assert offloaded.nodes == plain.nodes > 100
    assert offloaded.object_bytes > NODE_BYTES * offloaded.nodes


MODELS = {"convolutions": little, "lstm": zoo.lstm, "gpt": zoo.gpt}


def test_a_risk_is_advised_only_where_it_is_not_allowed_already():
    allowed, asked = (plan(little(), "90%", risk, RATES).reasons for risk in ("neutral", "exact"))
    assert not any("--risk neutral" in reason for reason in allowed)
    assert any("a smaller budget may need a plan of risk neutral" in reason for reason in allowed)
    assert any("--risk neutral" in reason for reason in asked)


@pytest.mark.parametrize("name", ["convolutions", "lstm", pytest.param("gpt", marks=pytest.mark.slow)])
def test_a_larger_budget_never_gives_a_slower_plan_of_the_same_risk(name):
    """Nor a rougher one; a plan of lower risk may be slower, for exactness is spent last."""
    plain = plan(MODELS[name](), "100%", rates=RATES).budget_bytes
    draw, found = random.Random(0), []
    for budget in (*sorted(draw.uniform(0.3, 1.5) * plain for _ in range(4)), 3 * plain):
        with contextlib.suppress(NoPlanFits):
            search = Search(MODELS[name](), round(budget), RATES)
            option = next(filter(None, (search.best(level) for level in Risk)), None)
            if option is not None:
                found.append((option.risk, search.candidates.roughness(option), search.time_ratio(option)))
    assert len(found) > 3 and found == sorted(found, reverse=True) and found[-1][2] <= 1


def test_the_table_marks_the_chosen_plan_and_counts_objects_in_every_row():
    found = plan(little(), PLAIN * 9 // 10, rates=RATES)
    (chosen,) = [row for row in found.alternatives if row["chosen"]]
    assert chosen["settings"] == found.techniques() and chosen["object_bytes"] == found.object_bytes
    assert all(row["object_bytes"] > 0 for row in found.alternatives)
    assert chosen["predicted_peak_bytes"] == found.predicted_peak_bytes
    needs = [row["predicted_peak_bytes"] + row["object_bytes"] for row in found.alternatives]
    assert needs == sorted(needs)
    lines = str(found).splitlines()
    assert sum(line.startswith("*") or line.strip().startswith("*") for line in lines) == 1
    for row, line in zip(found.alternatives, lines[-len(needs) :], strict=True):
        assert format_bytes(row["predicted_peak_bytes"] + row["object_bytes"]) in line
    assert (
        found._repr_html_().count("<tr") == len(needs) + 1
        and "<script" not in found.with_(task="<script>")._repr_html_()
    )


def test_a_row_of_the_table_has_the_scratch_of_its_operators():
    asked = []

    def calibrate(signatures):
        asked.extend(map(str, signatures))
        return {str(call): 1000 for call in signatures}

    found = plan(little(), PLAIN * 9 // 10, rates=RATES, calibrate=calibrate)
    search = Search(little(), PLAIN, RATES, dict.fromkeys(asked, 1000))
    for row in found.alternatives:
        if not row["estimated"]:
            assert row["predicted_peak_bytes"] == search.traces.of(tuple(row["settings"].items())).peak_bytes


def test_without_a_budget_the_trade_offs_and_the_least_budget_that_works_are_told():
    found = plan(little(), None, rates=RATES)
    assert found.budget_bytes is None and "the least budget that works at risk neutral is" in str(found)
    least = found.least_budget_bytes
    assert plan(little(), least, rates=RATES).predicted_peak_bytes <= least
    with pytest.raises(NoPlanFits):
        plan(little(), round(0.97 * least), rates=RATES)
    assert len({row["risk"] for row in found.alternatives}) > 1


def test_a_budget_may_be_a_share_of_what_plain_training_needs():
    whole = plan(little(), "100%", rates=RATES)
    half = plan(little(), "50%", rates=RATES)
    assert half.budget_bytes == round(whole.budget_bytes / 2)
    assert half.predicted_peak_bytes + half.object_bytes <= half.budget_bytes
    for text in ("-5%", "0%", "lots%", "nan%"):
        with pytest.raises(ShoestringError, match="is not a share"):
            plan(little(), text, rates=RATES)


def test_techniques_with_further_settings_are_held_to_a_budget_too():
    named = {"nonzero": {"nonzero": 30, "method": "set"}, "microbatch": {"size": 20, "simulated": False}}
    found = plan(little(), "1GB", risk="approximate", rates=RATES, **named)
    assert found.techniques()["nonzero"] == named["nonzero"] and "method" in str(found)
    assert found.predicted_peak_bytes == traced_peak(little(), found.techniques())
    assert Plan.from_json(found.to_json()).techniques() == found.techniques()
