from shoestring.ledger import Category, Ledger, Phase
from shoestring.reporting.timeline import timeline

MB = 10**6


def test_only_the_last_step_is_shown_without_its_tear_down(ledger):
    steps = timeline(ledger, 1000)
    assert steps.totals[0] == 113 * MB  # model, input and state, and the first activation
    assert steps.totals[-1] == 13 * MB
    begins = {str(span.phase): span.first for span in steps.spans}
    assert begins == {"forward": 0, "backward": 2, "update": 7}


def test_no_peak_is_lost_however_few_the_columns(ledger):
    for columns in (1, 2, 3, 7):
        steps = timeline(ledger, columns)
        assert len(steps.totals) == columns
        assert max(steps.totals) == steps.totals[steps.peak_column] == ledger.peak().bytes


def test_the_parts_of_a_column_sum_to_its_total(ledger):
    steps = timeline(ledger, 5)
    assert [sum(sizes) for sizes in zip(*steps.parts.values(), strict=True)] == steps.totals


def test_a_short_step_can_be_stretched(ledger):
    assert len(timeline(ledger, 70, stretch=True).totals) == 70
    assert len(timeline(ledger, 70).totals) == 10


def test_spans_tile_the_columns(ledger):
    spans = timeline(ledger, 40, stretch=True).spans
    assert [span.first for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == 40


def test_recomputation_belongs_to_the_backward_pass():
    ledger = Ledger()
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        ledger.birth(1, Category.ACTIVATION, phase=phase)
    assert [span.phase for span in timeline(ledger, 10).spans] == ["forward", "backward"]


def test_a_ledger_that_holds_only_what_was_built_is_shown_whole():
    ledger = Ledger()
    ledger.birth(4, Category.MODEL)
    ledger.birth(6, Category.MODEL)
    assert timeline(ledger, 10).totals == [4, 10]


def test_microbatches_are_counted_however_few_the_columns():
    ledger = Ledger()
    for _ in range(12):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            ledger.death(ledger.birth(1, Category.ACTIVATION, phase=phase))
    ledger.birth(1, Category.OPTIMIZER, phase=Phase.UPDATE)
    assert timeline(ledger, 3).microbatches == 12
