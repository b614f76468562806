import json
import sys

import pytest
import torch

import shoestring as package
from shoestring.cli import doctor
from shoestring.errors import how_to_install
from shoestring.kernels import core
from shoestring.measuring import products


def test_a_healthy_machine_is_told_line_by_line(shoestring):
    answer = shoestring("doctor")
    assert answer.code == 0
    versions = [package.__version__, torch.__version__]
    expected = [*versions, "python", "onednn", "core", "cpu", "threads", "meter heap", "cache", "[plot]"]
    assert [words for words in expected if words not in answer.out] == []


def test_the_json_tells_the_core_in_use_and_why(shoestring):
    health = json.loads(shoestring("doctor", "--json").out)
    assert health["healthy"] and health["problems"] == []
    assert health["core"]["name"] == core.name
    assert health["core"]["reason"]
    assert health["threads"] == torch.get_num_threads()
    assert health["versions"]["torch"] == torch.__version__


def test_a_core_that_does_not_load_is_a_problem_with_a_remedy(shoestring, monkeypatch):
    monkeypatch.delattr("shoestring.kernels.core")
    monkeypatch.setitem(sys.modules, "shoestring.kernels.core", None)
    answer = shoestring("doctor")
    assert answer.code == 1
    assert "the compiled core does not load" in answer.out and "SHOESTRING_CORE=torch" in answer.out


def test_a_forced_core_says_who_forced_it(shoestring, monkeypatch):
    monkeypatch.setenv("SHOESTRING_CORE", "generic")
    core = json.loads(shoestring("doctor", "--json").out)["core"]
    assert core["reason"] == "SHOESTRING_CORE=generic says so"


def test_a_missing_extra_comes_with_its_command(shoestring, monkeypatch):
    from shoestring.cli import doctor

    monkeypatch.setattr(doctor, "_installed", lambda package: package != "matplotlib")
    extras = json.loads(shoestring("doctor", "--json").out)["extras"]
    assert extras["plot"] == {"installed": False, "install": how_to_install("plot")}
    assert extras["nlp"]["installed"]
    assert how_to_install("plot") in shoestring("doctor").out


def test_developers_extras_are_not_for_users(shoestring):
    assert "dev" not in json.loads(shoestring("doctor", "--json").out)["extras"]


def test_every_meter_says_whether_it_works_and_how(shoestring):
    meters = json.loads(shoestring("doctor", "--json").out)["meters"]
    assert meters["allocator"]["works"]
    assert meters["cuda"]["works"] == torch.cuda.is_available()
    assert all(meter["how"] for meter in meters.values())


def test_the_cache_folder_follows_the_environment(shoestring, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert json.loads(shoestring("doctor", "--json").out)["cache"] == str(tmp_path / "shoestring")


def test_the_doctor_trains_a_tiny_model_and_says_what_it_needed(shoestring):
    found = json.loads(shoestring("doctor", "--json").out)
    assert found["healthy"] and found["trial"]["predicted_bytes"] == pytest.approx(
        found["trial"]["measured_bytes"], rel=0.01
    )


@pytest.mark.parametrize(("act", "runs"), [("pass", True), ("import os; os.kill(os.getpid(), 4)", False)])
def test_products_in_bf16_that_end_a_process_are_a_problem_with_a_remedy(shoestring, monkeypatch, act, runs):
    monkeypatch.setattr(products, "announces_amx", lambda: True)
    monkeypatch.setattr(products, "TRY", act)
    answer = shoestring("doctor")
    assert (answer.code == 0) == runs
    assert ("set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in answer.out) != runs


@pytest.mark.parametrize("failure", [RuntimeError("duplicate registrations"), None])
def test_a_machine_on_which_a_step_fails_or_needs_something_else_is_not_healthy(shoestring, monkeypatch, failure):
    def tried():
        if failure:
            raise failure
        return 1000, 2000, "no technique"

    monkeypatch.setattr(doctor, "_tried", tried)
    answer = shoestring("doctor")
    assert answer.code == 1
    assert ("RuntimeError: duplicate registrations" if failure else "not what was predicted") in answer.out
