"""Data files that somebody made to do harm are refused at once: nothing is run, filled up or waited for."""

import gzip
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from layouts import cifar_pickle, labels, pictures

from shoestring.ambient import Ambient
from shoestring.data import idx, pickles
from shoestring.data.files import map_file, need_file
from shoestring.data.folders import Room, open_folders
from shoestring.data.idx import read_idx
from shoestring.data.images import open_images
from shoestring.data.pairs import Lines
from shoestring.data.pickles import read_pickle
from shoestring.errors import ShoestringError

SECONDS = 5  # for what takes milliseconds on an idle machine and hours without a bound

DEEP, WIDE = 200_000, 60
PICKLES = {
    "a deep tuple": b"})" + b"\x85" * DEEP + b".",
    "a deep tuple as a key": b"})" + b"\x85" * DEEP + b"K\x01s.",
    "a deep tuple as a value": b"}U\x01a)" + b"\x85" * DEEP + b"s.",
    "a tuple that doubles": b"}U\x01a)q\x00" + b"h\x00h\x00\x86q\x00" * WIDE + b"s.",
    "a tuple that doubles as a key": b"})q\x00" + b"h\x00h\x00\x86q\x00" * WIDE + b"K\x01s.",
    "a list that holds itself": b"]q\x00h\x00a.",
    "a list of lists": b"}U\x01a]]as.",
    "a dictionary that holds itself": b"}q\x00U\x01ah\x00s.",
    "a dictionary in a list in a dictionary": b"}U\x01a]}as.",
    "a tuple of a list": b"}U\x01a]\x85s.",
    "a number as a key": b"}K\x01K\x01s.",
    "a list as a key": b"}]K\x01s.",
    "an array as a key": b"}cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85RK\x01s.",
    "a call without arguments": b"}U\x01acnumpy.core.multiarray\n_reconstruct\n)Rs.",
    "a call of a number": b"}U\x01aK\x01K\x01\x85Rs.",
    "a call with a list": b"}U\x01acnumpy\ndtype\n]Rs.",
    "an array whose shape is a tuple of tuples": (
        b"}U\x01acnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x85R(K\x01)\x85U\x02u1\x89T\0\0\0\0tbs."
    ),
    "a name without an end": b"c" + b"a" * 3_000_000,
    "an odd number of entries": b"}(K\x01u.",
    "an empty stack": b".",
    "a mark that is not there": b"}t.",
    "a mark in place of the dictionary": b"(.",
}


def in_time(function, *arguments):
    """What is raised, if it is raised soon: in CPU seconds, for others may be busy."""
    start = time.process_time()
    with pytest.raises(ShoestringError) as told:
        function(*arguments)
    assert time.process_time() - start < SECONDS
    return str(told.value)


@pytest.mark.parametrize("crafted", PICKLES.values(), ids=PICKLES)
def test_a_pickle_that_nests_shares_or_calls_otherwise_is_refused(tmp_path, crafted):
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02" + crafted)
    assert "is not one of CIFAR-10's python files: at byte" in in_time(read_pickle, path)


@pytest.mark.parametrize("piece", [b")", b"K\x01", b"]", b"q\x00"])
def test_a_pickle_of_more_instructions_than_those_files_have_is_refused(tmp_path, piece, monkeypatch):
    monkeypatch.setattr(pickles, "_MOST_STEPS", 1000)
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}" + piece * 2000 + b".")
    assert "1,000 instructions have passed" in in_time(read_pickle, path)


def test_the_bound_on_instructions_leaves_room_for_the_official_files(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(cifar_pickle(pictures(1, 0), labels(10_000, 0)))
    assert len(read_pickle(tmp_path / "data_batch_1")["labels"]) == 10_000


def write_zipped(path, header, zeros):
    with gzip.open(path, "wb", 9) as file:
        file.write(header)
        for _ in range(zeros >> 20):
            file.write(bytes(1 << 20))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Counts the bytes that go to the disk when files are unzipped."""
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    counts = [0]

    def count(chunks):
        def counted():
            for chunk in chunks:
                counts[0] += len(chunk)
                yield chunk

        return real(counted())

    real = idx.spill
    monkeypatch.setattr(idx, "spill", count)
    return counts


@pytest.mark.parametrize("dimensions, shape", [(1, (10,)), (3, (2, 5, 5))])
def test_a_gzip_bomb_is_unzipped_no_further_than_its_header_promises(tmp_path, written, dimensions, shape):
    path = tmp_path / "bomb.gz"
    write_zipped(path, bytes((0, 0, 8, dimensions)) + struct.pack(f">{dimensions}I", *shape), 50 << 20)
    assert "more than" in in_time(read_idx, path, dimensions)
    assert written[0] == 4 + 4 * dimensions + np.prod(shape)


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 1, 1), (70_000, 200, 200)])
def test_a_gzip_bomb_that_promises_what_no_such_set_holds_is_not_unzipped(tmp_path, written, shape):
    path = tmp_path / "bomb.gz"
    write_zipped(path, bytes((0, 0, 8, 3)) + struct.pack(">3I", *shape), 5 << 20)
    assert "unzip it yourself" in in_time(read_idx, path, 3)
    assert written[0] == 0


def test_a_bomb_that_is_no_idx_file_is_not_unzipped(tmp_path, written):
    write_zipped(tmp_path / "bomb.gz", b"", 5 << 20)
    assert "another kind of file" in in_time(read_idx, tmp_path / "bomb.gz", 3)
    assert written[0] == 0


@pytest.mark.parametrize("read", [map_file, need_file, read_pickle, lambda p: read_idx(p, 1), lambda p: list(Lines(p))])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a link to a pipe"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, read, kind):
    path = tmp_path / "data.gz"
    make_special(path, kind)
    assert "is not a regular file" in in_time(read, path)


def make_special(path, kind):
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to(path.with_name("pipe"))


def image_folder(folder):
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        (folder / split / "cat").mkdir(parents=True)
        image.new("RGB", (8, 8)).save(folder / split / "cat" / "a.png")
    return image


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a link to a pipe"])
def test_an_image_that_is_no_regular_file_is_refused_when_the_folder_is_opened(tmp_path, kind):
    image_folder(tmp_path)
    make_special(tmp_path / "train" / "cat" / "b.jpg", kind)
    assert "b.jpg is not a regular file" in in_time(open_images, tmp_path)


def test_an_image_that_became_a_pipe_is_refused_when_it_is_read(tmp_path):
    image_folder(tmp_path)
    train, _ = open_folders(tmp_path, 8)
    path = tmp_path / "train" / "cat" / "a.png"
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in in_time(train.read, np.array([0]))


def test_an_image_of_more_pixels_than_memory_should_hold_is_not_decoded(tmp_path):
    image = image_folder(tmp_path)
    image.new("1", (10_000, 7_000)).save(tmp_path / "train" / "cat" / "a.png")
    train, _ = open_folders(tmp_path, 8)
    assert "10000 x 7000 pixels" in in_time(train.read, np.array([0]))


def test_an_image_that_cannot_be_decoded_smaller_is_held_to_67_megabytes(tmp_path):
    """Of a PNG every pixel is decoded, of a JPEG no more than the crop needs."""
    image = pytest.importorskip("PIL.Image").new("L", (5000, 5000))
    for ending in ("png", "jpg"):
        for split in ("train", "val"):
            (tmp_path / ending / split / "cat").mkdir(parents=True)
            image.save(tmp_path / ending / split / "cat" / f"a.{ending}")
    png, jpeg = (open_folders(tmp_path / ending, 32)[0] for ending in ("png", "jpg"))
    assert "5000 x 5000 pixels decoded at once" in in_time(png.read, np.array([0]))
    assert jpeg.read(np.array([0]))[0].shape == (1, 3, 32, 32)


def test_an_image_of_a_format_that_starts_other_programs_is_not_opened(tmp_path):
    image = image_folder(tmp_path)
    image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "a.png", format="EPS")
    train, _ = open_folders(tmp_path, 8)
    assert "cannot be decoded" in in_time(train.read, np.array([0]))


def test_within_a_budget_images_are_decoded_in_the_room_that_it_leaves(tmp_path):
    """A PNG of 400 x 500 pixels takes 0.8 MB decoded, one in grey twice that; of four threads as many run as fit."""
    image = image_folder(tmp_path)
    for number in range(8):
        image.new("RGB", (400, 500)).save(tmp_path / "train" / "cat" / f"{number}.png")
    train, _ = open_folders(tmp_path, 8)
    indices, batch = np.arange(len(train)), 3 * 8 * 8 * len(train)
    with Ambient.during(room=None):
        free = train.read(indices)[0]
    with Ambient.during(room=lambda: batch + 800_000):
        assert torch.equal(train.read(indices)[0], free)
    with Ambient.during(room=lambda: batch + 799_990):
        told = in_time(train.read, indices)
    assert "it takes 800.0 KB decoded, and the budget leaves 800.0 KB" in told


def test_threads_share_the_room_for_decoding():
    room, most, lock = Room(100), [0, 0], threading.Lock()

    def use(size):
        with room.taken(size):
            with lock:
                most[0] += size
                most[1] = max(most)
            time.sleep(0.001)
            with lock:
                most[0] -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, [40, 60, 100, 10, 30] * 8))
    assert 60 < most[1] <= 100 and room.taken_bytes == 0
    with pytest.raises(ValueError, match="takes 101 B decoded, and the budget leaves 100 B"), room.taken(101):
        pass
