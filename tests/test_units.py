import pytest
from hypothesis import given
from hypothesis import strategies as some

from shoestring import ShoestringError
from shoestring.units import format_bytes, format_flops, parse_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("7MB", 7_000_000),
        ("7 mb", 7_000_000),
        ("7M", 7_000_000),
        ("1.5GB", 1_500_000_000),
        (".5kB", 500),
        ("512KiB", 512 * 1024),
        ("2MiB", 2 * 2**20),
        ("1e6", 1_000_000),
        ("12", 12),
        (12, 12),
        (1.5e3, 1500),
        (" 3 GiB ", 3 * 2**30),
    ],
)
def test_a_size_is_read_as_it_is_written(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "7 parsecs", "-7MB", -7, "7MB7", "1,5GB", "nan", "inf", "0x10", None])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ShoestringError, match="is not a size in bytes: write it as 7MB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0.2", "0MB", "1e300", "9e99TB", "2000000TB"])
def test_a_size_out_of_range_is_refused(text):
    with pytest.raises(ShoestringError, match="out of range"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "size, words",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.000 KB"),
        (6_672_000, "6.672 MB"),
        (404_802_000, "404.8 MB"),
        (2_896_000_000, "2.896 GB"),
        (5 * 10**15, "5000 TB"),
        (-1_500_000, "-1.500 MB"),
    ],
)
def test_bytes_are_written_to_four_digits(size, words):
    assert format_bytes(size) == words


@given(some.integers(1, 10**15))
def test_what_is_written_reads_back_to_its_digits(size):
    assert abs(parse_bytes(format_bytes(size, digits=6)) - size) <= size * 1e-5


@pytest.mark.parametrize("size", [999_949, 999_950, 999_999, 999_999_999])
def test_rounding_never_makes_a_thousand_of_a_unit(size):
    assert not format_bytes(size).startswith("1000")


@pytest.mark.parametrize(
    "flops, words", [(12, "12 FLOP"), (3.2e6, "3.2 MFLOP"), (1.29e10, "12.9 GFLOP"), (4e15, "4 PFLOP")]
)
def test_floating_point_operations_have_units(flops, words):
    assert format_flops(flops) == words
