import hashlib
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from layouts import (
    Numbered,
    cifar_pickle,
    idx_bytes,
    labels,
    pictures,
    short_string,
    write_cifar_binary,
    write_cifar_python,
    write_idx,
    write_image_folder,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import shoestring
from shoestring.data import Augment, ImageBatches, folders, on_images, open_images
from shoestring.data.cifar import CLASSES
from shoestring.data.pickles import read_pickle
from shoestring.errors import ShoestringError
from shoestring.step import Stepper
from shoestring.techniques import microbatch


def everything(split):
    return split.read(np.arange(len(split)))


@pytest.mark.parametrize("write", [write_cifar_binary, write_cifar_python])
def test_both_cifar_layouts_give_the_images_that_were_written(tmp_path, write):
    images = open_images(write(tmp_path / "data"))
    assert (len(images.train), len(images.test), images.shape) == (20, 4, (3, 32, 32))
    assert images.classes[9] == "truck"
    read, numbers = everything(images.train)
    assert (read.numpy() == np.concatenate([pictures(4, seed) for seed in range(5)])).all()
    assert (numbers.numpy() == np.concatenate([labels(4, seed) for seed in range(5)])).all()
    assert (everything(images.test)[0].numpy() == pictures(4, 5)).all()


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_images_stand_in_the_middle_of_32_by_32(tmp_path, zipped):
    images = open_images(write_idx(tmp_path / "data", zipped=zipped), channels=3)
    read, numbers = everything(images.train)
    assert images.shape == (3, 32, 32) and read.dtype == torch.uint8
    expected = np.pad(pictures(6, 0, (1, 28, 28)), ((0, 0), (0, 0), (2, 2), (2, 2)))
    assert (read.numpy() == expected).all() and (numbers.numpy() == labels(6, 0)).all()


def test_normalised_training_images_have_mean_0_and_standard_deviation_1(tmp_path):
    images = open_images(write_idx(tmp_path / "data"))
    normal = Augment(images.mean, images.std).normalise(everything(images.train)[0])
    assert abs(normal.mean()) < 1e-5 and abs(normal.std(correction=0) - 1) < 1e-5


@pytest.mark.parametrize("value, size", [(0, 28), (0, 32), (200, 32)], ids=["black in a border", "black", "grey"])
def test_images_of_one_value_alone_stay_finite(tmp_path, value, size):
    folder = write_idx(tmp_path / "data")
    for split in ("train", "t10k"):
        image = np.full((6, size, size), value, np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx_bytes(image))
    images = open_images(folder)
    assert Augment(images.mean, images.std).normalise(everything(images.train)[0]).abs().max() < 1e-6


def test_image_folders_are_decoded_and_labelled_by_folder(tmp_path):
    images = open_images(write_image_folder(tmp_path), size=16)
    assert images.classes == ("cat", "dog") and images.shape == (3, 16, 16)
    read, numbers = everything(images.test)
    assert numbers.tolist() == [0, 0, 0, 1, 1, 1]
    assert read[:, 0].float().mean((1, 2)).tolist() == [0, 0, 0, 250, 250, 250]
    assert read[:, 1, 0, 0].tolist() == [0, 20, 40] * 2


def test_image_folders_are_resized_to_what_is_asked_for_or_to_the_models_own_side(tmp_path):
    folder = write_image_folder(tmp_path)
    assert open_images(folder).shape == (3, 224, 224)
    assert open_images(folder, resized=32).shape == (3, 32, 32)
    assert open_images(folder, size=16, resized=32).shape == (3, 16, 16)


def test_random_parts_of_an_image_depend_on_its_key_alone(tmp_path):
    from PIL import Image

    write_image_folder(tmp_path)
    Image.fromarray(pictures(1, 0, (64, 48, 3))[0]).save(tmp_path / "train" / "cat" / "0.png")
    train = open_images(tmp_path, size=16).train
    keys = np.arange(6, dtype=np.uint64)
    together, _ = train.read(np.arange(6), keys)
    assert (train.read(np.array([0]), keys[:1])[0] == together[:1]).all()
    assert (train.read(np.array([0]), keys[1:2])[0] != together[:1]).any()


def test_a_folder_that_holds_the_usual_download_is_looked_into(tmp_path):
    write_cifar_python(tmp_path / "cifar-10-batches-py")
    assert len(open_images(tmp_path).train) == 20


def test_the_embedded_images_are_balanced_and_need_no_download():
    images = open_images(channels=3)
    assert (len(images.train), len(images.test), images.shape) == (4000, 1000, (3, 32, 32))
    assert images.classes[8] == "Bag"
    for split, each in ((images.train, 400), (images.test, 100)):
        assert torch.bincount(everything(split)[1]).tolist() == [each] * 10
    assert images.mean[0] == images.mean[2] == pytest.approx(0.2195, abs=0.005)


@pytest.mark.parametrize("write", [write_cifar_binary, write_cifar_python, write_idx])
def test_an_open_data_set_holds_almost_no_memory(tmp_path, write):
    folder = write(tmp_path / "data", count=500)
    open_images(folder)
    tracemalloc.start()
    try:
        images = open_images(folder)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        images.train.read(np.arange(10))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 50_000 and peak - held < 20_000  # torch's own memory, the batch, is not traced


# Batches


def batches(folder, size, seed=7, **options):
    images = open_images(write_cifar_binary(folder / "data"))
    return ImageBatches(images.train, size, Augment(images.mean, images.std, **options), seed)


def test_an_epoch_serves_each_image_once_in_an_order_of_its_own(tmp_path):
    loader = batches(tmp_path, 5)
    seen = [[loader.read(epoch, n)[0] for n in range(len(loader))] for epoch in (0, 1)]
    marks = [[tuple(image.flatten()[:9].tolist()) for batch in epoch for image in batch] for epoch in seen]
    assert len(set(marks[0])) == 20 and set(marks[0]) == set(marks[1]) and marks[0] != marks[1]


def test_a_batch_is_the_same_when_it_is_read_again(tmp_path):
    first, again = batches(tmp_path, 6).read(3, 2), batches(tmp_path, 6).read(3, 2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_the_last_batch_is_left_out_in_training_and_kept_in_testing(tmp_path):
    assert len(batches(tmp_path, 6)) == 3
    testing = batches(tmp_path, 6, seed=None)
    assert len(testing) == 4 and len(testing.read(0, 3)[0]) == 2


def test_the_size_of_a_microbatch_does_not_change_the_augmentation(tmp_path):
    loader = batches(tmp_path, 8)
    images, _, draws = loader.read(2, 0)
    whole = loader.augment(images, draws)
    pieces = [loader.augment(images[i : i + 3], draws[i : i + 3]) for i in range(0, 8, 3)]
    assert torch.equal(whole, torch.cat(pieces))


def test_the_size_of_a_batch_does_not_change_the_order_or_the_draws(tmp_path):
    large, small = batches(tmp_path, 8), batches(tmp_path, 4)
    halves = zip(small.read(1, 0), small.read(1, 1), strict=True)
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(large.read(1, 0), halves, strict=True))


def test_crops_and_flips_are_those_drawn():
    augment = Augment((0.5,), (0.25,), pad=2)
    image = torch.from_numpy(pictures(1, 0, (1, 6, 6)))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    draws = torch.tensor([[0, 0, 0], [-2, 1, 0], [2, -1, 1]], dtype=torch.int8)
    cropped = augment.crop(image.expand(3, -1, -1, -1), draws)
    assert torch.equal(cropped[0], image[0])
    assert torch.equal(cropped[1], padded[0, :, 0:6, 3:9])
    assert torch.equal(cropped[2], padded[0, :, 4:10, 1:7].flip(-1))
    assert torch.allclose(augment(image, draws[:1]), (image / 255 - 0.5) / 0.25, atol=1e-5)


def test_all_crops_and_both_flips_are_drawn_equally_often():
    draws = Augment((0.0,), (1.0,)).draw(np.arange(40_000, dtype=np.uint64)).long()
    for column, kinds in ((0, 9), (1, 9), (2, 2)):
        counts = torch.bincount(draws[:, column] - draws[:, column].min())
        assert len(counts) == kinds and (counts / 40_000 * kinds - 1).abs().max() < 0.06
    assert torch.corrcoef(draws.T.float())[0, 1].abs() < 0.02


def test_a_loss_on_floats_takes_batches_of_bytes(tmp_path):
    loader = batches(tmp_path, 4)
    seen = []
    loss = on_images(lambda model, batch: seen.append(batch) or batch[0].mean(), loader.augment)
    loss(torch.nn.Identity(), loader.read(0, 0))
    floats, numbers = seen[0]
    assert floats.dtype == torch.float32 and numbers.shape == (4,)


def test_augmentation_can_be_traced_on_fake_tensors():
    with FakeTensorMode():
        images = torch.empty(5, 3, 32, 32, dtype=torch.uint8)
        out = Augment((0.5,) * 3, (0.2,) * 3)(images, torch.zeros(5, 3, dtype=torch.int8))
    assert out.shape == (5, 3, 32, 32) and out.dtype == torch.float32


def test_microbatches_of_bytes_train_as_a_batch_of_floats_would():
    images = open_images(channels=3)
    batches = ImageBatches(images.train, 8, Augment(images.mean, images.std), seed=0)
    bytes_, labels, draws = batches.read(0, 0)
    floats = batches.augment(bytes_, draws), labels
    trained = []
    for batch in ((bytes_, labels, draws), floats):
        task = shoestring.builtin("wrn-10-1", batch=8)
        loss = on_images(task.loss, batches.augment) if len(batch) == 3 else task.loss
        task = microbatch.apply(task.with_(batch=batch, loss=loss), microbatch.Settings(3))
        Stepper(task).step(batch)
        trained.append(torch.nn.utils.parameters_to_vector(task.model.parameters()))
    assert torch.equal(*trained)


# What is refused


def refusal(folder, **options) -> str:
    with pytest.raises(ShoestringError) as caught:
        open_images(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_cannot_be_data_are_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "cifar.tar.gz").write_bytes(b"x")
    assert "is a file: unpack it" in refusal(tmp_path / "cifar.tar.gz")
    assert "has no known image layout" in refusal(tmp_path)


@pytest.mark.parametrize("end", ["", ".bin"])
def test_a_missing_or_empty_cifar_file_is_named(tmp_path, end):
    folder = (write_cifar_binary if end else write_cifar_python)(tmp_path / "data")
    (folder / f"data_batch_3{end}").write_bytes(b"")
    assert f"data_batch_3{end} is empty" in refusal(folder)
    (folder / f"data_batch_3{end}").unlink()
    assert f"data_batch_3{end} is missing" in refusal(folder)


def test_a_cifar_file_that_is_cut_short_is_named_with_its_bytes(tmp_path):
    folder = write_cifar_binary(tmp_path / "data")
    path = folder / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "data_batch_2.bin is truncated: 12,291 bytes" in refusal(folder)
    path.write_bytes(whole[:-3073])
    assert "[4, 3, 4, 4, 4] images" in refusal(folder)


def test_a_wrong_label_is_named_with_its_image(tmp_path):
    folder = write_cifar_binary(tmp_path / "a")
    rows = np.fromfile(folder / "test_batch.bin", np.uint8).reshape(4, -1)
    rows[2, 0] = 10
    (folder / "test_batch.bin").write_bytes(rows.tobytes())
    assert "test_batch.bin: image 2 has label 10, but labels go from 0 to 9" in refusal(folder)
    folder = write_cifar_python(tmp_path / "b")
    (folder / "test_batch").write_bytes(cifar_pickle(pictures(4, 0), np.array([1, 2, 3, 11], np.uint8)))
    assert "image 3 has label 11" in refusal(folder)


def test_labels_and_images_of_different_number_are_refused(tmp_path):
    folder = write_cifar_python(tmp_path / "a")
    (folder / "data_batch_1").write_bytes(cifar_pickle(pictures(4, 0), labels(3, 0)))
    assert "has 3 labels but images of shape (4, 3072)" in refusal(folder)
    folder = write_idx(tmp_path / "b")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels(5, 0)))
    assert "6 images" in refusal(folder) and "5 labels" in refusal(folder)


def test_a_wrong_magic_number_is_shown(tmp_path):
    folder = write_idx(tmp_path / "data")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(pictures(6, 0, (28, 28))))
    assert "begins with 00000803" in refusal(folder) and "00000801" in refusal(folder)


@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_that_is_cut_short_is_named(tmp_path, zipped):
    folder = write_idx(tmp_path / "data", zipped=zipped)
    path = folder / f"t10k-images-idx3-ubyte{'.gz' if zipped else ''}"
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in refusal(folder) and "truncated" in refusal(folder)


def test_image_folders_that_do_not_match_are_refused(tmp_path):
    folder = write_image_folder(tmp_path)
    (folder / "val" / "dog").rename(folder / "val" / "zebra")
    assert "'zebra'" in refusal(folder)
    (folder / "val" / "zebra").rename(folder / "val" / "dog")
    for file in (folder / "train" / "dog").iterdir():
        file.unlink()
    assert "dog holds no image" in refusal(folder)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    folder = write_image_folder(tmp_path)
    (folder / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(ShoestringError, match=r"cat/1\.png cannot be decoded"):
        everything(open_images(folder, size=16).train)


def test_image_folders_without_pillow_say_what_to_install(tmp_path, monkeypatch):
    train = open_images(write_image_folder(tmp_path), size=16).train
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ShoestringError, match=r"pip install '.*\[images\]'"):
        everything(train)


def test_shapes_that_cannot_be_served_are_refused(tmp_path):
    folder = write_cifar_binary(tmp_path / "data")
    assert "3 channel(s) cannot have 1" in refusal(folder, channels=1)
    assert "32x32 do not fit into 28x28" in refusal(folder, size=28)


def test_batches_larger_than_the_data_are_refused(tmp_path):
    with pytest.raises(ShoestringError, match="batches of 21 cannot be made from 20 images"):
        batches(tmp_path, 21)


# The reader of CIFAR-10's python files


def test_the_dialect_is_that_of_the_official_files(tmp_path):
    """`batches.meta`, rebuilt from its instructions, has the published checksum, and is read."""
    put, names = Numbered(), list(CLASSES)
    parts = [b"\x80\x02}", put(), b"(", short_string("num_cases_per_batch"), put(), b"M\x10\x27"]
    parts += [short_string("label_names"), put(), b"]", put(), b"("]
    parts += [part for name in names for part in (short_string(name), put())]
    whole = b"".join([*parts, b"e", short_string("num_vis"), put(), b"M\x00\x0cu."])
    assert hashlib.md5(whole).hexdigest() == "5ff9c542aee3614f3951f8cda6e48888"
    (tmp_path / "batches.meta").write_bytes(whole)
    assert read_pickle(tmp_path / "batches.meta") == {
        "num_cases_per_batch": 10000, "label_names": names, "num_vis": 3072,
    }  # fmt: skip


@pytest.mark.parametrize(
    "evil",
    [
        b"\x80\x02cos\nsystem\nU\x0btouch /tmp/x\x85R.",
        b"\x80\x02cbuiltins\neval\nU\x011\x85R.",
        b"cnumpy.core.multiarray\n_reconstruct\nU\x011\x85R.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}.",
        b"(dp0\n.",
        b"\x80\x02}(U\x01aK\x01",
        b"\x80\x02U\xffshort",
        b"\x80\x02T\xff\xff\xff\xffx.",
        b"\x80\x02]}K\x01s.",
        b"\x80\x02u.",
        b"\x80\x02K\x01.",
        b"\x80\x02h\x05.",
        b"not a pickle at all",
    ],
)
def test_a_pickle_that_is_anything_else_is_refused_and_not_run(tmp_path, evil):
    (tmp_path / "data_batch_1").write_bytes(evil)
    with pytest.raises(ShoestringError, match="not one of CIFAR-10's python files") as caught:
        read_pickle(tmp_path / "data_batch_1")
    assert "\n" not in str(caught.value)


def test_no_byte_of_a_python_file_can_be_cut_off_unnoticed(tmp_path):
    whole = cifar_pickle(pictures(1, 0)[:, :1, :2, :2], labels(1, 0))
    path = tmp_path / "data_batch_1"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ShoestringError):
            read_pickle(path)


@pytest.mark.parametrize("write", [write_cifar_binary, write_cifar_python, write_idx])
def test_a_fingerprint_tells_images_apart_that_differ_in_one_bit(tmp_path, write):
    folder = write(tmp_path / "data", 70)
    before = open_images(folder).train.fingerprint()
    assert open_images(folder).train.fingerprint() == before
    for path in sorted(folder.glob("*batch_3*")) or sorted(folder.glob("train-images*")):
        for place in (-10_000, -20_001, -30_002):  # bytes of different pictures
            flip(path, place)
            assert open_images(folder).train.fingerprint() != before
            flip(path, place)
    assert open_images(folder).train.fingerprint() == before


@pytest.mark.parametrize("whole", [2**30, 0], ids=["every byte", "both ends of each file"])
def test_a_fingerprint_tells_image_folders_apart_by_every_file(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(folders, "_MOST_WHOLE", whole)
    folder = write_image_folder(tmp_path / "data", 40)
    before = open_images(folder).train.fingerprint()
    assert open_images(folder).train.fingerprint() == before
    for path in sorted((folder / "train").glob("*/*7.png")):
        flip(path, -20)
        assert open_images(folder).train.fingerprint() != before
        flip(path, -20)
    (folder / "train" / "cat" / "39.png").rename(folder / "train" / "cat" / "x.png")
    assert open_images(folder).train.fingerprint() != before


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
