"""The one ambient object: each thread has its own, a backward pass sees its step's, and nothing is left of it."""

import re
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd import Function

import shoestring
from shoestring.ambient import Ambient
from shoestring.ledger import Phase


def test_there_is_no_ambient_state_but_in_one_module():
    source = Path(shoestring.__file__).parent
    files = [path for path in source.rglob("*.py") if re.search(r"ContextVar|threading\.local", path.read_text())]
    assert files == [source / "ambient.py"]


def test_fields_are_as_before_after_the_context_whatever_was_raised_inside():
    with Ambient.during(phase=Phase.FORWARD, stores=(abs,)):
        with pytest.raises(ZeroDivisionError), Ambient.during(phase=Phase.RECOMPUTE):
            assert Ambient.now().phase == Phase.RECOMPUTE and Ambient.now().stores == (abs,)
            raise ZeroDivisionError
        assert Ambient.now() == Ambient(phase=Phase.FORWARD, stores=(abs,))
    assert Ambient.now() == Ambient()


def test_a_context_leaves_the_other_fields_as_somebody_else_has_changed_them():
    with Ambient.during(phase=Phase.FORWARD):
        Ambient.change(outside_call="a call that began inside")
    assert Ambient.now() == Ambient(outside_call="a call that began inside")
    Ambient.change(outside_call=None)


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(ValueError):
        Ambient.change(faze=Phase.FORWARD)


def test_another_thread_has_its_own():
    seen = []
    with Ambient.during(mode="this thread's"):
        thread = threading.Thread(target=lambda: seen.append(Ambient.now()))
        thread.start()
        thread.join()
    assert seen == [Ambient()]


def test_a_backward_pass_sees_what_is_around_the_call_of_backward():
    seen = []

    class Look(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), Ambient.now().phase, Ambient.now().mode))
            return grad

    with Ambient.during(mode="of the step"):
        loss = Look.apply(torch.ones(3, requires_grad=True)).sum()
        with Ambient.during(phase=Phase.BACKWARD):
            loss.backward()
    assert seen == [(threading.get_ident(), Phase.BACKWARD, "of the step")]
