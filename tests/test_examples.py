"""The examples run, and what they print is true of what they did."""

import ast
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from shoestring.techniques.activations.codecs import CODECS

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def load(name: str):
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def same_codecs(monkeypatch):
    """An example adds one."""
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)


def test_your_own_loop_learns_in_half_of_the_memory(capsys):
    assert load("own_loop").main(updates=40) > 0.5  # chance is 0.1
    assert "planned: {'" in capsys.readouterr().out


def test_a_transformers_model_trains_under_a_plan_written_by_hand(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    losses = load("transformers_model").main(updates=4)
    assert losses == sorted(losses, reverse=True)
    peaks = [line.split(": ")[1].split(" MB")[0] for line in capsys.readouterr().out.splitlines() if "peak" in line]
    assert float(peaks[1]) < float(peaks[0]) / 2


def test_hugging_faces_trainer_learns_inside_a_budget():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    lines = load("huggingface_trainer").main(steps=5)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["mem/predicted_bytes"] <= lines[-1]["mem/budget_bytes"] == 5_000_000


def test_a_lightning_module_learns_inside_a_budget():
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    found = load("lightning_module").main(epochs=1)
    assert found["train_loss"] < 2.0  # chance is 2.3
    assert found["mem/predicted_bytes"] <= found["mem/budget_bytes"] == 6_000_000


def test_a_loop_of_accelerate_learns_with_a_plan():
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    losses = load("accelerate_loop").main(epochs=2)
    assert losses[1] < losses[0] < 2.3


def test_a_model_too_big_to_build_is_planned_on_meta():
    plan = load("too_big_to_build").main()
    assert plan.techniques() and plan.predicted_peak_bytes <= plan.budget_bytes == 80_000_000_000


def test_a_new_codec_stores_saved_activations_in_a_quarter():
    (plain, loss), (lean, quantised) = load("new_codec").main()
    assert lean < 0.7 * plain
    assert quantised == pytest.approx(loss, rel=1e-3) and quantised != loss


def test_one_of_several_processes_trains_alone_as_well():
    """In several it is run by tests/distributed/test_torchrun.py."""
    losses = load("several_processes").main(updates=5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_says_how_it_is_run_and_has_a_test(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f'load("{path.stem}")' in Path(__file__).read_text()
