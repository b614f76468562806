import numpy as np
import pytest

from shoestring.data.files import Rows, need_file, spill
from shoestring.errors import ShoestringError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_spilled_bytes_are_read_back_and_leave_no_file(cache):
    data = spill([b"abc", b"", b"de"])
    assert data.tobytes() == b"abcde" and list(cache.iterdir()) == []
    assert not data.flags.writeable and len(spill([])) == 0


def test_rows_of_any_length_and_text_of_any_kind_come_back(cache):
    rows = Rows.spilled(np.arange(n, dtype=np.int32) for n in (3, 0, 5))
    assert [row.tolist() for row in (rows[0], rows[1], rows[2])] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    assert rows.lengths().tolist() == [3, 0, 5]
    texts = ["größe", "", "\udcff odd file name"]
    assert list(Rows.of_texts(texts).texts()) == texts


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ShoestringError, match=r"cannot create the cache folder .*SHOESTRING_CACHE"):
        spill([b"x"])


def test_a_full_disk_is_told(cache, monkeypatch):
    def full():
        yield b"x"
        raise OSError(28, "No space left on device")

    with pytest.raises(ShoestringError, match="No space left on device; free some space"):
        spill(full())


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ShoestringError, match="cannot be read"):
        need_file(tmp_path / "file")
