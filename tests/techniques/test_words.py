"""One list of techniques: plans, flags and records are made from it, and a plan can say every setting."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from small import Noise, task
from table import EVERY_SETTING

import shoestring.techniques
from shoestring import Plan, ShoestringError, apply, train
from shoestring.techniques import WORDS
from shoestring.techniques.registry import REGISTRY, apply_settings
from shoestring.techniques.words import in_words

ROOT = Path(__file__).parents[2]
WORD = {word.name: word for word in WORDS}


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.name)
def test_a_plan_has_a_field_for_each_word_and_the_word_names_every_setting_of_its_record(word):
    assert word.name in {f.name for f in fields(Plan)}
    assert list(word.settings) == [f.name for f in fields(REGISTRY[word.name].settings)]
    assert word.name in EVERY_SETTING, "add a value that sets all of them"


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.name)
def test_the_table_of_techniques_names_each_with_its_module_and_its_card(word):
    rows = re.findall(r"\| `(\w+)` \| (\w+)(?:/|\.py) \| .* \|", shoestring.techniques.__doc__)
    assert rows.count((word.name, word.module)) == 1 and len(rows) == len(WORDS)
    assert (ROOT / "docs" / "techniques" / f"{word.module}.md").is_file()


@pytest.mark.parametrize("name", WORD)
def test_the_command_line_can_say_all_settings_and_what_it_says_comes_back(name):
    value, text = EVERY_SETTING[name]
    assert WORD[name].parse(text) == value and in_words(value) == text


@pytest.mark.parametrize("name", WORD)
def test_all_settings_come_back_from_a_plan_file(name):
    made = Plan(**{name: EVERY_SETTING[name][0]})
    assert Plan.from_json(made.to_json()) == made and getattr(made, name) == EVERY_SETTING[name][0]
    assert made.techniques() == {name: EVERY_SETTING[name][0]}


def test_the_shortest_form_of_a_value_is_the_one_that_counts():
    assert Plan(nonzero={"nonzero": 30}) == Plan(nonzero={"nonzero": 30, "method": None}) == Plan(nonzero=30)
    assert Plan(nonzero={"nonzero": 100, "method": "set"}, checkpoint="none", precision="fp32").techniques() == {}


WRONG = [
    ("nonzero", {"nonzero": 30, "metod": "set"}, "nonzero has no setting 'metod': after its value come method, layers"),
    ("nonzero", {"method": "set"}, "nonzero lacks 'nonzero'"),
    ("nonzero", {"nonzero": 30, "method": 3}, "nonzero method is 3, which is not text"),
    ("nonzero", {"nonzero": 30, "layers": "conv"}, "nonzero layers is 'conv', which is not a list of names"),
    ("nonzero", "many", "nonzero is 'many', which is not a percentage"),
    ("nonzero", True, "nonzero is True, which is not a percentage"),
    ("microbatch", 2.5, "microbatch is 2.5, which is not a whole number"),
    ("microbatch", {"size": 2, "simulated": 1}, "microbatch simulated is 1, which is not true or false"),
    ("precision", {"form": "fp16", "seed": 1}, "precision has no setting 'seed': it takes one value alone"),
    ("checkpoint", 2, "checkpoint is 2, which is not text"),
]


@pytest.mark.parametrize("name, value, complaint", WRONG, ids=lambda part: str(part)[:40])
def test_a_wrong_setting_is_refused_in_one_line_that_names_it(name, value, complaint):
    for use in (lambda: Plan(**{name: value}), lambda: apply_settings(task(), {name: value}),
                lambda: Plan.from_json(json.dumps({"version": 1, name: value}))):  # fmt: skip
        with pytest.raises(ShoestringError) as error:
            use()
        assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, text, complaint",
    [
        ("nonzero", "30,metod=set", "nonzero has no setting 'metod'"),
        ("nonzero", "30,set", "nonzero has no setting 'set'"),
        ("nonzero", "30,method", "nonzero: method has no value: write it as method=VALUE"),
        ("nonzero", "30,updates=often", "updates: 'often' is not a whole number"),
        ("nonzero", "30,updates=0", "updates: 0 is out of range"),
        ("microbatch", "4,simulated=perhaps", "simulated: 'perhaps' is not true or false"),
        ("microbatch", "four", "'four' is not a whole number"),
    ],
)
def test_what_the_command_line_cannot_mean_is_refused_by_its_key(name, text, complaint):
    with pytest.raises(ShoestringError, match=complaint):
        WORD[name].parse(text)


def test_an_unknown_technique_is_refused_with_those_that_there_are():
    with pytest.raises(ShoestringError, match=r"there is no technique 'thrift': known are .*precision, optimizer"):
        apply_settings(task(), {"thrift": 1})


# -- plans of before ----------------------------------------------------------------------------------------------
def test_a_plan_with_a_word_that_is_no_more_is_refused_with_the_words_that_there_are():
    with pytest.raises(ShoestringError, match=r"a field 'keep' that does not exist \(techniques: .*activations"):
        Plan.from_json('{"version": 1, "microbatch": 2, "keep": "disk"}')
    assert Plan.from_json('{"version": 1, "microbatch": 2, "keep": null}') == Plan(microbatch=2)


# -- in force -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values, settings",
    [
        ({"nonzero": {"nonzero": 50, "method": "set", "seed": 0}}, {"nonzero": {"nonzero": 50, "method": "set"}}),
        ({"nonzero": {"nonzero": 50, "method": "dsr"}}, {"nonzero": 50}),
        ({"microbatch": {"size": 2, "by": "examples"}}, {"microbatch": {"size": 2, "by": "examples"}}),
        ({"microbatch": 2, "checkpoint": "every-2"}, {"checkpoint": "every-2", "microbatch": 2}),
    ],
    ids=str,
)
def test_a_task_says_which_settings_are_in_force_without_those_that_are_usual(values, settings):
    assert apply(task(), Plan(**values)).task.settings == settings


RESUMED = [
    ({"nonzero": 50}, {"nonzero": {"nonzero": 50, "method": "set"}}, "nonzero method was None and is now set"),
    ({"nonzero": {"nonzero": 50, "seed": 1}}, {"nonzero": {"nonzero": 50, "seed": 2}}, "seed was 1 and is now 2"),
    ({"microbatch": 2}, {"microbatch": {"size": 2, "by": "examples"}}, "microbatch by was None and is now examples"),
    ({"microbatch": 2}, {}, "techniques microbatch was 2 and is now None"),
]


@pytest.mark.parametrize("before, now, complaint", RESUMED)
def test_a_run_is_resumed_with_all_its_settings_only(tmp_path, before, now, complaint):
    before, now = Plan(**before), Plan(**now)
    train(apply(task(), before), Noise(), updates=1, run=tmp_path / "run")
    with pytest.raises(ShoestringError, match=complaint):
        train(apply(task(), now), Noise(), updates=1, run=tmp_path / "run", resume=True)
    train(apply(task(), before), Noise(), updates=1, run=tmp_path / "run", resume=True)


def test_a_run_folder_keeps_all_settings_of_its_plan(tmp_path):
    plan = Plan(nonzero={"nonzero": 50, "method": "set", "layers": ["*"]})
    train(apply(task(), plan), Noise(), updates=1, run=tmp_path / "run")
    again = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert again == plan
    train(apply(task(), again), Noise(), updates=1, run=tmp_path / "run", resume=True)


def test_a_number_out_of_range_is_told_on_one_line():
    word = next(word for word in WORDS if word.name == "nonzero")
    with pytest.raises(ShoestringError, match=r"\A0 is out of range: it must be above 0 and at most 100\Z"):
        word.parse("0\n")
