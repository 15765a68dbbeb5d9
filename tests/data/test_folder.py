"""Directories of images: sizes, modes, layouts, splits and unreadable files; the cache: test_folder_cache.py."""

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.folders import load, use_cache_in, write_folder
from tests.data.helpers import assert_bit_equal, write_image, write_png_header
from torchcaps.cli import main
from torchcaps.data import DataError, Folder, Loader, create_dataset, images


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache_in(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def test_classes_splits_and_sizes(folder: Path) -> None:
    parts = {split: load(folder, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 27, "val": 3, "test": 3}
    for part in parts.values():
        assert part.classes == ("cat", "dog", "eel")
        assert part.shape == (3, 25, 25)  # the median shorter side
        assert set(part.labels.tolist()) == {0, 1, 2}
    colors = [{tuple(image[:, 0, 0].tolist()) for image in part.images} for part in parts.values()]
    assert sum(map(len, colors)) == len(set.union(*colors)) == 33  # every image in one split, none twice
    again = create_dataset(str(folder), "test")  # a path is a name, too
    assert_bit_equal(again.get_batch(torch.arange(3)).images, parts["test"].images)
    assert Loader(parts["train"], 8).batch(0, 0).images.shape == (8, 3, 25, 25)


def test_random_split_depends_on_names_and_seed(folder: Path) -> None:
    def colors(**options: Any) -> set[tuple[int, ...]]:
        return {
            tuple(image[:, 0, 0].tolist())
            for image in load(folder, "test", test_fraction=0.3, size=8, **options).images
        }

    before = colors()
    assert colors() == before
    assert colors(seed=1) != before
    for n in range(3):
        write_image(folder / "cat" / f"new{n}.png", seed=500 + n)
    assert len(colors() & before) >= len(before) - 3


def test_split_directories(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for split, count in (("Train", 4), ("validation", 2), ("test", 3)):
        for name in ("a", "b"):
            for n in range(count):
                write_image(root / split / name / "deeper" / f"{n}.jpg", (40, 40))
    assert [len(load(root, split)) for split in ("train", "val", "test")] == [8, 4, 6]
    assert load(root).shape == (3, 40, 40)  # all of one size stay as they are
    for path in (root / "validation").rglob("*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match="validation/a"):
        load(root, "val")
    assert len(load(root)) == 8  # the other splits are not read
    os.rename(root / "validation", tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"'val'.*'Train'.*'test'"):
        load(root, "val")
    write_image(root / "test" / "c" / "1.jpg")
    with pytest.raises(DataError, match=r"test.*'c'"):
        load(root, "test")
    for path in (root / "test/c/1.jpg", *(root / "test/b/deeper").iterdir()):
        path.unlink()
    for name in ("c", "b/deeper", "b"):
        (root / "test" / name).rmdir()
    assert load(root, "test").labels.tolist() == [0, 0, 0]  # of the classes a and b one is enough
    assert load(root, "test").classes == ("a", "b")


def test_directory_next_to_the_split_directories(tmp_path: Path) -> None:
    """The splits must not become classes."""
    root = tmp_path / "images"
    for split in ("train", "test"):
        for name in "ab":
            write_image(root / split / name / "1.png")
    for junk in ("__MACOSX", "notes", "train/__pycache__"):
        (root / junk).mkdir()
    assert load(root).classes == ("a", "b")
    write_image(root / "unlabeled/1.png")
    with pytest.warns(UserWarning, match="unlabeled.*'train'.*'test'"):
        assert load(root).classes == ("a", "b")


@pytest.mark.parametrize("folders", [("val", "test"), ("seg_train", "seg_test"), ("train_set", "other")])
def test_split_directories_are_never_classes(tmp_path: Path, folders: tuple[str, str]) -> None:
    for split in folders:
        for name in "ab":
            write_image(tmp_path / "images" / split / name / "1.png")
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "images"))):
        load(tmp_path / "images")


def test_classes_may_have_equal_subdirectories(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for year in ("2024", "2025"):
            write_image(tmp_path / "images" / name / year / "1.png")
    assert load(tmp_path / "images", val_fraction=0, test_fraction=0).classes == ("cat", "dog")


def test_nested_files_with_equal_names_are_split_at_random(tmp_path: Path) -> None:
    for n in range(40):
        for name in "ab":
            write_image(tmp_path / "images" / name / f"subject{n:02}" / "img.png", (6, 6), seed=n)
    held = load(tmp_path / "images", "test", test_fraction=0.25).images[:, :, 0, 0]
    first = load(tmp_path / "images", val_fraction=0, test_fraction=0).images[:10, :, 0, 0]
    assert len({tuple(x.tolist()) for x in held[:10]} & {tuple(x.tolist()) for x in first}) < 8


def test_image_modes(tmp_path: Path) -> None:
    """Gray, palette, transparent, 16 bits and CMYK are converted to the color that a viewer shows."""
    root = tmp_path / "images"
    gray = write_image(root / "a/gray.png", mode="L").parent
    one = Image.open(gray / "gray.png").getpixel((0, 0))
    write_image(root / "b/gray.png", mode="1")
    assert load(root, val_fraction=0, test_fraction=0).shape[0] == 1
    sixteen = Image.fromarray(np.full((20, 30), 40_000, np.uint16))
    sixteen.save(root / "b/sixteen.png")
    dataset = load(root, val_fraction=0, test_fraction=0)
    assert dataset.shape == (1, 20, 30)
    values = sorted(int(image[0, 5, 5]) for image in dataset.images)
    assert round(40_000 / 257) in values
    assert one in values
    Image.new("RGBA", (30, 20), (200, 0, 0, 0)).save(root / "a/clear.png")  # wholly transparent
    Image.new("RGB", (30, 20), (10, 200, 30)).convert("P").save(root / "a/palette.gif")
    Image.new("CMYK", (30, 20), (0, 255, 255, 0)).save(root / "b/ink.jpg")
    color = load(root, val_fraction=0, test_fraction=0)
    assert color.shape == (3, 20, 30)
    seen = {tuple(image[:, 5, 5].tolist()) for image in color.images}
    assert color.images[0, :, 5, 5].tolist() == [255, 255, 255]  # a/clear.png: white, not the red or black below
    assert any(g > 150 and r < 60 for r, g, b in seen), f"no green image: {seen}"
    assert any(r > 200 and g < 60 for r, g, b in seen), f"no red image: {seen}"
    assert load(root, val_fraction=0, test_fraction=0, channels="gray").shape == (1, 20, 30)


def test_sixteen_bits_are_divided_by_257(tmp_path: Path) -> None:
    """The conversion does not depend on the values of an image: 255 of 65,535 is as dark as 256."""
    for name, levels in (("a", (200, 255, 256)), ("b", (300, 4_095, 33_000, 65_535))):
        for level in levels:
            path = write_image(tmp_path / "images" / name / f"{level:05}.png")
            Image.fromarray(np.full((9, 9), level, np.uint16)).save(path)
    values = load(tmp_path / "images", val_fraction=0, test_fraction=0).images[:, 0, 4, 4].tolist()
    assert values == [round(level / 257) for level in (200, 255, 256, 300, 4_095, 33_000, 65_535)]


def test_exif_orientation_in_inferred_size(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (80, 40)).save(tmp_path / "images" / name / "1.jpg", exif=exif)
    assert load(tmp_path / "images").shape == (3, 80, 40)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    root = tmp_path / "images"
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 255  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be affine_matrix clockwise by a quarter
    for name in "ab":
        (root / name).mkdir(parents=True)
        Image.fromarray(pixels).save(root / name / "1.png", exif=exif)
    image = load(root, size=16, val_fraction=0, test_fraction=0, fit="stretch").images[0, 0]
    assert int(image[2].min()) > 200  # white is above,
    assert int(image[13].max()) < 50  # black below


def test_fit(tmp_path: Path) -> None:
    root = tmp_path / "images"
    pixels = np.zeros((30, 90, 3), np.uint8)
    pixels[:, 30:60] = 255
    for name in "ab":
        (root / name).mkdir(parents=True)
        Image.fromarray(pixels).save(root / name / "1.png")
    means = {
        fit: float(load(root, size=30, val_fraction=0, test_fraction=0, fit=fit).images.float().mean())
        for fit in ("crop", "pad", "stretch")
    }
    assert means["crop"] == 255  # the middle
    assert 80 < means["stretch"] < 90  # a third of it white
    assert 25 < means["pad"] < 32  # a ninth


def test_unreadable_images_raise_or_are_skipped(folder: Path) -> None:
    broken = [folder / "cat/bad.png", folder / "dog/cut.png"]
    broken[0].write_bytes(b"not an image")
    broken[1].write_bytes((folder / "dog/1.png").read_bytes()[:50])
    for options in ({}, {"size": 8, "channels": "color"}):
        with pytest.raises(DataError) as error:
            load(folder, val_fraction=0, test_fraction=0, on_error="fail", **options)
        for part in ("2 of 35", str(broken[0]), "--on-error skip", "on_error='skip'"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)
        for _ in range(2):  # the second time from the cache
            with pytest.warns(UserWarning, match=r"2 of 35 .*bad\.png, .*cut\.png"):
                dataset = load(folder, val_fraction=0, test_fraction=0, **options)
            assert len(dataset) == len(dataset.labels) == 33
            assert torch.bincount(dataset.labels).tolist() == [10, 11, 12]


def test_images_with_too_many_pixels_are_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = folder / "cat/bomb.png"
    write_png_header(bomb, 9000, 9000)
    with pytest.raises(DataError, match=rf"1 of 34 .*{bomb} .*9000x9000 .*64"):
        load(folder, val_fraction=0, test_fraction=0, on_error="fail")
    with pytest.warns(UserWarning, match=r"1 of 34 .*bomb\.png"):
        assert len(load(folder, val_fraction=0, test_fraction=0, on_error="skip")) == 33
    with pytest.raises(DataError, match=rf"1 of 34 .*{bomb} \((?!9000x)"):  # now its content is what is missing
        load(folder, val_fraction=0, test_fraction=0, max_megapixels=82, on_error="fail")
    for limit in (-1.0, 90.0):
        with pytest.raises(ValueError, match=f"max_megapixels.*89, got {limit}"):
            load(folder, max_megapixels=limit)
    bomb.unlink()
    monkeypatch.setattr(images, "LARGE_IMAGE_PIXELS", 0)  # one at a time
    assert len(load(folder, val_fraction=0, test_fraction=0, cache=False)) == 33


def test_all_images_unreadable(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(b"no")
    for action in ("skip", "fail"):
        with pytest.raises(DataError, match=r"2 .*1\.png"):
            load(tmp_path / "images", on_error=action)


def test_other_files_are_ignored(folder: Path) -> None:
    (folder / "cat/notes.txt").write_text("x")
    (folder / "cat/.hidden.png").write_text("x")
    (folder / ".git").mkdir()
    (folder / "readme.md").write_text("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(folder)) == 27


def test_invalid_layouts(tmp_path: Path, folder: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (None, "--data-dir"),
        (tmp_path / "nowhere", "nowhere"),
        (folder / "cat", "images/cat"),
        ("./nowhere", "nowhere"),
    ]
    for root, mentions in cases:
        with pytest.raises(DataError, match=mentions):
            create_dataset("folder", "train", root)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="images/empty"):
        load(folder)
    write_image(tmp_path / "lone/train/a/1.png")
    with pytest.raises(DataError, match=r"lone.*'train'"):
        load(tmp_path / "lone")
    with pytest.raises(ValueError, match=r"\./nowhere"):
        create_dataset("./nowhere")
    write_image(tmp_path / "one/only/1.png")
    with pytest.raises(DataError, match="'only'"):
        load(tmp_path / "one")
    with pytest.raises(ValueError, match=r"name=.*root="):
        create_dataset(str(folder), root=folder)
    (folder / "empty").rmdir()
    with pytest.raises(DataError, match=r"images.*'val'"):
        load(folder, "val", val_fraction=0)
    for options, mentions in (
        ({"val_fraction": 0.6, "test_fraction": 0.4}, "val_fraction and test_fraction.* 0.6 and 0.4"),
        ({"size": 0}, "size.* 0"),
    ):
        with pytest.raises(ValueError, match=mentions):
            Folder(**options)  # type: ignore[arg-type]


def test_small_classes_keep_a_training_image(tmp_path: Path) -> None:
    for name, count in (("a", 1), ("b", 2), ("c", 3)):
        for n in range(count):
            write_image(tmp_path / "images" / name / f"{n}.png", seed=n)
    for shares in (
        {"test_fraction": 0.4, "val_fraction": 0.1},
        {"test_fraction": 0.45, "val_fraction": 0.5},
        {"test_fraction": 0.5, "val_fraction": 0.45},
    ):
        train = load(tmp_path / "images", **shares)
        assert sorted(set(train.labels.tolist())) == [0, 1, 2]


def test_classes_of_three_or_more_are_in_all_splits(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 40)):
        for n in range(count):
            write_image(tmp_path / "images" / name / f"{n}.png", (6, 6), seed=n)
    for split in ("val", "test"):
        assert torch.bincount(load(tmp_path / "images", split).labels).tolist() == [1, 4]


def test_parallel_decoding_keeps_the_order(tmp_path: Path) -> None:
    """Images are decoded by several threads."""
    root = tmp_path / "images"
    for number, name in enumerate("abcd"):
        for n in range(40):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), 60 * number + n).save(root / name / f"{n:02}.png")
    dataset = load(root, val_fraction=0, test_fraction=0)
    values = dataset.images[:, 0, 4, 4].long()
    assert_bit_equal(values // 60, dataset.labels)
    assert sorted(values.tolist()) == sorted(60 * number + n for number in range(4) for n in range(40))


def test_given_classes_decide_about_indices(folder: Path) -> None:
    """A class without a subdirectory has no images; a subdirectory that is not a class is an error."""
    dataset = load(folder, "all", classes=("eel", "fox", "dog", "cat"))
    assert dataset.classes == ("eel", "fox", "dog", "cat")
    assert torch.bincount(dataset.labels, minlength=4).tolist() == [12, 0, 11, 10]
    assert len(load(folder, "test", classes=("eel", "fox", "dog", "cat"))) == 3
    with pytest.raises(DataError, match="'dog'"):
        load(folder, classes=("cat", "eel"))
    with pytest.raises(ValueError, match="classes"):
        Folder(classes=("cat", "cat"))
    for name in ("dog", "eel"):
        shutil.rmtree(folder / name)
    assert set(load(folder, "all", classes=("cat", "dog")).labels.tolist()) == {0}


def test_a_directory_above_the_classes_is_named_in_the_error(folder: Path) -> None:
    inner = str(folder)
    with pytest.raises(DataError, match=re.escape(inner)):
        load(folder.parent, cache=False)


def test_memory_of_all_images_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of the images can come from the run of a stranger."""
    n_bytes = load(folder, "all", cache=False).images.numel()
    monkeypatch.setattr(images, "memory_limit", lambda: 2 * n_bytes)
    assert len(load(folder, "all", cache=False)) == 33
    monkeypatch.setattr(images, "memory_limit", lambda: 2 * n_bytes - 2)
    with pytest.raises(DataError, match="33 images of 3x25x25 need"):
        load(folder, "all", cache=False)


def test_names_that_are_not_utf8_are_rejected(folder: Path) -> None:
    """Figures and files of results could not contain them."""
    os.rename(folder / "dog", os.fsencode(folder) + b"/dog\xff")
    with pytest.raises(DataError, match="not valid UTF-8"):
        load(folder)


def test_control_characters_in_names_are_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "dog").rename(folder / "dog\x1b[31m")
    (folder / "cat" / "0\x1b[32m.png").write_bytes(b"not an image")
    before = warnings.showwarning
    main(["data", "check", str(folder), "--split", "all"])
    output = capsys.readouterr()
    assert "dog\\x1b" in output.out
    assert "0\\x1b" in output.err
    assert "\x1b" not in output.out + output.err
    assert warnings.showwarning is before
