import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoestring as package
from shoestring.cli import doctor
from shoestring.cli.main import COMMANDS, _run, main
from shoestring.cli.options import Parser, write_text
from shoestring.errors import Diverged, NotWritten


def raises(error):
    def examine():
        raise error

    return examine


def test_help_names_every_command(shoestring):
    answer = shoestring("--help")
    assert answer.code == 0
    assert "profile" in answer.out and "doctor" in answer.out


@pytest.mark.parametrize("command", ["doctor", "train", "profile", "fidelity"])
def test_help_does_not_wait_for_torch(command):
    code = f"import sys, shoestring.cli.main as m; m.main(['{command}', '-h'])"
    check = "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    script = f"import atexit, sys; atexit.register(lambda: {check}); {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_the_version_is_the_packages(shoestring):
    assert shoestring("--version").out == f"shoestring {package.__version__}\n"


def test_no_command_is_wrong_usage_that_lists_them(shoestring):
    answer = shoestring()
    assert answer.code == 2
    commands = "profile, plan, train, evaluate, translate, export, bench, fidelity, study, report, models, doctor"
    assert answer.complaint == f"name a command: {commands}; see `shoestring --help`"


def test_an_unknown_command_is_named_with_the_choices(shoestring):
    answer = shoestring("profil")
    assert answer.code == 2
    assert "'profil'" in answer.complaint and "did you mean profile?" in answer.complaint


def test_an_unknown_option_is_named_with_the_one_that_was_meant(shoestring):
    answer = shoestring("profile", "wrn-28-2", "--bach=3")
    assert answer.code == 2
    assert answer.complaint == "`shoestring profile` takes no '--bach'; did you mean --batch?"


def test_an_option_like_no_other_is_answered_with_all(shoestring):
    assert "--json" in shoestring("doctor", "--zzz").complaint


def test_an_abbreviated_option_is_refused(shoestring):
    assert shoestring("doctor", "--js").complaint.endswith("did you mean --json?")


def test_an_error_of_ours_gives_its_own_exit_code(shoestring, monkeypatch):
    monkeypatch.setattr(doctor, "examine", raises(Diverged("the loss is nan\n  at step 3")))
    answer = shoestring("doctor")
    assert (answer.code, answer.complaint) == (5, "the loss is nan at step 3")


def test_an_unexpected_error_is_one_line_with_a_way_to_see_more(shoestring, monkeypatch):
    monkeypatch.setattr(doctor, "examine", raises(KeyError("x")))
    answer = shoestring("doctor")
    assert answer.code == 1
    assert "KeyError" in answer.complaint and "SHOESTRING_TRACEBACK=1" in answer.complaint


def test_the_traceback_is_there_for_who_asks(shoestring, monkeypatch):
    monkeypatch.setattr(doctor, "examine", raises(KeyError("x")))
    monkeypatch.setenv("SHOESTRING_TRACEBACK", "1")
    with pytest.raises(KeyError):
        shoestring("doctor")


def test_an_interrupt_ends_quietly(shoestring, monkeypatch):
    monkeypatch.setattr(doctor, "examine", raises(KeyboardInterrupt()))
    answer = shoestring("doctor")
    assert (answer.code, answer.complaint) == (130, "stopped")


@pytest.mark.skipif(os.name != "posix", reason="pipes of the shell")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_a_reader_that_leaves_early_is_no_error(arguments):
    script = "from shoestring.cli import doctor, main; doctor._lines = lambda health: [('x', 'y', True)]; "
    script += "doctor.examine = lambda: {'healthy': True, 'problems': []}; "
    script += f"raise SystemExit(main.main({arguments}))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_file_for_which_the_disk_has_no_room_is_told_and_not_left_empty(tmp_path, monkeypatch):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("as it was")

    def full(path, text, *_):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    for path in (old, new):
        with pytest.raises(NotWritten, match="No space left on device; make room, or write elsewhere") as refused:
            write_text(path, "{}")
        assert refused.value.exit_code == 1
    assert old.exists() and not new.exists()


def test_output_for_which_the_disk_has_no_room_is_told_as_that(shoestring, monkeypatch):
    monkeypatch.setattr(doctor, "examine", raises(OSError(errno.ENOSPC, "No space left on device")))
    answer = shoestring("doctor")
    assert answer.code == 1 and "the output cannot be written: No space left on device" in answer.err


def test_where_stderr_is_closed_words_do_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["profle"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words, hint", [
    (("profle",), "there is no command 'profle': did you mean profile?"),
    (("evalute", "runs/a"), "did you mean evaluate?"),
    (("xyz",), "there is no command 'xyz': there are profile, plan, train"),
    (("help", "train"), "did you mean --help?"),
    (("Train", "wrn-10-1"), "did you mean train?"),
    (("profile", "vit"), "did you mean vit-tiny?"),
    (("plan", "wrn-10-1", "--budget", "-5MB"), "'-5MB' is not a size"),
    (("profile", "wrn-10-1", "--batch", "1000000"), "from 1 to 81,380, as many as 1 GB holds"),
    (("profile", "wrn-10-1", "second"), "takes no further argument 'second'"),
    (("profile", "wrn-27-2"), "try 28"),
    (("profile", "resnet-18"), "did you mean resnet18?"),
    (("profile", "nothing-like-it"), "use one of wrn-DEPTH-WIDTH"),
    (("train", "wrn-10-1", "--epochs", "1", "--replan"), "--replan is about a budget"),
    (("train", "wrn-10-1", "--epochs", "1", "--risk", "exact"), "--risk is about a budget"),
])  # fmt: skip
def test_a_word_that_is_nearly_right_is_answered_with_the_right_one(shoestring, words, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = shoestring(*words)
    assert answer.code == 2 and hint in answer.complaint


def test_help_tells_the_default_of_every_option_that_has_one(monkeypatch):
    found = {}
    monkeypatch.setattr(Parser, "parse_known_args", lambda parser, argv: found.setdefault("parser", parser) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _run([])
    [commands] = [action.choices for action in found["parser"]._actions if action.dest == "command"]
    silent = [
        f"{name} {action.option_strings[-1]}"
        for name, parser in commands.items()
        for action in parser._actions
        if action.option_strings and action.default not in (None, False, "==SUPPRESS==")
        if "default" not in (action.help or "")
    ]
    assert len(commands) == len(COMMANDS) and not silent


def test_the_error_of_a_users_own_code_is_shown_whole(shoestring, user):
    model = user("def task():\n    raise RuntimeError('first line\\n\\tsecond line\\n\\tthird')")
    assert "RuntimeError: first line second line third (line" in shoestring("profile", model).complaint


def test_the_package_completes_in_a_notebook_and_what_it_gives_shows_itself():
    import shoestring as package

    assert set(package.__all__) <= set(dir(package))
    task = package.Task(
        torch.nn.Linear(2, 2), lambda model, batch: model(batch).mean(), torch.zeros(4, 2), package.SGD()
    )
    lean = package.apply(task, package.Plan(microbatch=2))
    assert repr(lean) == "LeanTask(Linear: microbatch 2)"
    lean.step(task.batch)
    assert repr(lean) == "LeanTask(Linear: microbatch 2, 1 updates done)"
    shown = package.profile(lean.task, calibrate=False)._repr_html_()
    assert "<table>" in shown and "at the peak" in shown
