"""MODEL as users write it: what can be wrong with it is told in one line, with exit code 2."""

import json
import operator

import pytest

GOOD = "def task(batch=8): return make(batch=torch.zeros(batch, 4))\n"


def refused(shoestring, *arguments) -> str:
    answer = shoestring("profile", *arguments)
    assert answer.code == 2, answer
    return answer.complaint


def profiled(shoestring, *arguments) -> dict:
    answer = shoestring("profile", *arguments, "--json", "--no-calibrate")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def test_a_function_in_a_file_gives_the_task(shoestring, user):
    assert profiled(shoestring, user(GOOD))["bytes"]["model"] == (4 * 2 + 2) * 4


def test_a_function_in_a_module_gives_the_task(shoestring, user, tmp_path, monkeypatch):
    user(GOOD)
    monkeypatch.chdir(tmp_path)
    assert profiled(shoestring, "mine:task")["bytes"]["model"] == 40


def test_the_batch_asked_for_reaches_the_function(shoestring, user):
    assert profiled(shoestring, user(GOOD), "--batch", 100)["by_category"]["input"] == 100 * 4 * 4


def test_a_file_may_import_its_neighbour(shoestring, user, tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("width = 4")
    profiled(shoestring, user("import neighbour_of_mine\n" + GOOD))


def test_what_the_users_code_prints_does_not_spoil_the_data(shoestring, user):
    lines = "print('loading')\ndef noisy(model, batch):\n    print('step')\n    return loss(model, batch)\n"
    lines += "def task(): return make(loss=noisy)\n"
    answer = shoestring("profile", user(lines), "--json", "--no-calibrate")
    assert json.loads(answer.out)["rules"] == "real"
    assert "loading" in answer.err and "step" in answer.err


def test_an_unknown_model_is_named_with_the_choices(shoestring):
    complaint = refused(shoestring, "wrn28")
    assert "'wrn28'" in complaint and "wrn-28-2" in complaint


def test_a_file_that_is_not_there(shoestring, tmp_path):
    assert "there is no file" in refused(shoestring, f"{tmp_path}/none.py:task")


def test_a_file_that_cannot_be_read(shoestring, tmp_path):
    (tmp_path / "folder.py").mkdir()
    assert refused(shoestring, f"{tmp_path}/folder.py:task").endswith("cannot be read: Is a directory")


def test_a_file_that_is_no_text(shoestring, tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\xfe" * 50)
    complaint = refused(shoestring, f"{tmp_path}/binary.py:task")
    assert complaint.endswith("in binary.py") and "None" not in complaint


def test_a_file_without_a_function_named(shoestring, tmp_path):
    assert refused(shoestring, "mine.py").endswith("names no function: write it as file.py:function")
    assert "names no function" in refused(shoestring, "mine.py:")


def test_a_syntax_error_is_told_with_its_line(shoestring, user):
    complaint = refused(shoestring, user("def task(:\n"))
    assert "is not valid Python" in complaint and "line 1 of mine.py" in complaint


def test_an_import_that_fails_is_told_with_its_line(shoestring, user):
    complaint = refused(shoestring, user("import no_such_library\n" + GOOD))
    assert "No module named 'no_such_library' (line 1 of mine.py)" in complaint


def test_a_module_that_is_not_there(shoestring):
    complaint = refused(shoestring, "no_such_package.models:task")
    assert complaint.startswith("there is no module 'no_such_package'")


def test_a_function_that_is_not_there_is_answered_with_those_that_are(shoestring, user):
    complaint = refused(shoestring, user(GOOD, "tusk"))
    assert complaint.endswith("has no function 'tusk': it has task, loss, make")


def test_a_name_that_is_no_function(shoestring, user):
    assert refused(shoestring, user("task = 3")).endswith("is of type int, and no function: name one")


def test_a_function_that_raises_is_told_with_its_message_and_line(shoestring, user):
    lines = "def task():\n    raise ValueError('no data here\\nsecond line')\n"
    complaint = refused(shoestring, user(lines))
    assert complaint.endswith("raised ValueError: no data here second line (line 2 of mine.py)")


def test_an_error_deep_in_a_library_is_told_with_the_users_line(shoestring, user):
    lines = "def task():\n    import json\n    return json.loads('{')\n"
    assert "(line 3 of mine.py)" in refused(shoestring, user(lines))


def test_an_error_of_our_own_is_not_blamed_on_the_user(shoestring, user, monkeypatch):
    monkeypatch.setattr("shoestring.profiling.profile", operator.itemgetter("a bug"))
    answer = shoestring("profile", user(GOOD), "--no-calibrate")
    assert answer.code == 1 and "unexpected TypeError" in answer.complaint


def test_a_file_that_exits_is_told(shoestring, user):
    assert "raised SystemExit: 3 (line 1 of mine.py)" in refused(shoestring, user("raise SystemExit(3)"))


def test_a_function_that_returns_no_task(shoestring, user):
    complaint = refused(shoestring, user("def task(): return nn.Linear(4, 2)"))
    assert complaint.endswith("returned Linear, not a shoestring.Task: return one")


def test_a_function_that_wants_arguments(shoestring, user):
    complaint = refused(shoestring, user("def task(width): return make()"))
    assert complaint.endswith("cannot be called with no arguments: missing a required argument: 'width'")


def test_a_size_that_the_function_does_not_take(shoestring, user):
    complaint = refused(shoestring, user("def task(): return make()"), "--batch", 3)
    assert complaint.endswith("takes no argument 'batch': leave --batch out, or let the function take it")


@pytest.mark.parametrize(
    "change, words",
    [
        ("loss=lambda model, batch: model(batch).square()", "the loss has shape (8, 2)"),
        ("loss=lambda model, batch: batch.sum()", "the loss does not depend on any trainable parameter"),
        ("loss=lambda model, batch: 3.0", "the loss is float, not a tensor"),
        ("model=nn.ReLU()", "the model has no parameter"),
        ("model=3", "needs an nn.Module, not int"),
        ("batch=torch.zeros(8, 5)", "raised RuntimeError"),
        ("batch=OTHER_DEVICE", "on different devices (cpu, cuda:0)"),
    ],
)
def test_a_task_that_cannot_be_trained_is_told_why(shoestring, user, change, words):
    cuda = "import torch\nfrom torch._subclasses.fake_tensor import FakeTensorMode\n"
    cuda += "with FakeTensorMode(): OTHER_DEVICE = torch.zeros(8, 4, device='cuda:0')\n"
    lines = (cuda if "OTHER" in change else "") + f"def task(): return make({change})"
    assert words in refused(shoestring, user(lines))
