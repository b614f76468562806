"""The page and the figure of `shoestring fidelity`: a row per layer, a column per codec, whatever their number."""

import pytest

from shoestring.reporting.fidelity import fidelity_figure, fidelity_lines

LONG = "encoder.layers.0.attention.some.very.deep.projection.of.the.values"


def data(modules=("blocks.0.conv1", "blocks.0.conv2"), codecs=("int4", "pool2")):
    sizes = {"exact_bytes": 4_000_000, "stored_bytes": 500_000}
    layers = [
        {"module": module, "codec": codec, "cosine": 0.9 + 0.01 * n, "norm_ratio": 1.02} | sizes
        for module in modules for n, codec in enumerate(codecs)
    ]  # fmt: skip
    whole = [{"codec": codec, "cosine": 0.95, "peak_bytes": 9_000_000} | sizes for codec in codecs]
    probes = [{"step": step, "loss": 2.0, "cosines": dict.fromkeys(codecs, 0.95)} for step in (0, 5)]
    return {"task": "net", "steps": 10, "layers": layers, "whole": whole, "probes": probes}


def test_columns_are_aligned_and_every_number_is_there():
    head, columns, first, _, whole, saved, peak = fidelity_lines(data())
    assert head == "net: gradients of 2 of 10 steps, compressed against exact: cosine, norm ratio"
    assert first.split() == ["blocks.0.conv1", "4.000", "MB", "0.9000", "1.02", "0.9100", "1.02"]
    assert columns.endswith("pool2") and len(columns) == len(first)
    assert whole.split()[-2:] == ["0.9500", "0.9500"]
    assert saved.split()[-2:] == ["12.5%", "12.5%"] and peak.endswith("9.000 MB")


def test_a_long_name_keeps_its_end_and_two_layers_that_differ_at_the_front_stay_apart():
    lines = list(fidelity_lines(data(("encoder.layers.3.conv.input", "decoder.layers.3.conv.input", LONG))))
    assert len({line.split()[0] for line in lines[2:5]}) == 3
    assert lines[4].startswith("...") and "projection.of.the.values " in lines[4]


@pytest.mark.parametrize("modules, codecs", [(("a",), ("int4",)), ((LONG,) * 2, ("int8",)), ((), ("int4", "int2"))])
def test_a_figure_is_drawn_of_few_layers_of_one_codec_and_of_none(tmp_path, modules, codecs):
    path = tmp_path / "fidelity.svg"
    fidelity_figure(path, data(modules, codecs))
    assert path.read_text().startswith("<?xml")
    assert list(fidelity_lines(data(modules, codecs)))
