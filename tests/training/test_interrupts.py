"""A signal at any moment: work that can be repeated is broken off, and nothing else is."""

import signal
import sys

import pytest

from shoestring.training.interrupts import Interrupts


def evaluation():
    total = 0
    for number in range(3):
        total += number
    return total


def with_a_signal(moment: int):
    """Breaks the evaluation off at the `moment`-th bytecode -> what it gave, and whether the signal came in time."""
    interrupts, seen = Interrupts(), 0

    def trace(frame, event, argument):
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == moment:
                signal.raise_signal(signal.SIGTERM)
        return trace

    with interrupts.heeded():
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found = interrupts.breaking_off(evaluation)
        finally:
            sys.settrace(before)
    return found, seen >= moment, interrupts


def test_a_signal_at_any_bytecode_of_an_evaluation_ends_it_and_leaves_no_exception():
    moment, came, broken = 0, True, 0
    while came:
        moment += 1
        found, came, interrupts = with_a_signal(moment)
        assert found in (None, 3) and not interrupts._at_once
        assert (interrupts.received == signal.SIGTERM) is came
        broken += found is None
    assert moment > broken > 20


def test_an_interrupt_that_no_signal_of_ours_made_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupts().breaking_off(interrupted)
