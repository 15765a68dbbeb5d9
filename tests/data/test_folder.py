"""Folders of images: any size, mode and layout, splits, broken files, the cache."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import DataError, Folder, ImageSet, Loader, create_dataset


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/torchcaps/folders"


def picture(path: Path, size: tuple[int, int] = (20, 30), mode: str = "RGB", seed: int = 0) -> Path:
    """An image with one random colour, so that any resampling leaves it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = np.random.default_rng(seed).integers(0, 256, 3)
    Image.new("RGB", (size[1], size[0]), tuple(map(int, colour))).convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for number, name in enumerate(("cat", "dog", "eel")):
        for n in range(10 + number):
            picture(root / name / f"{n}.png", (20 + n, 30), seed=100 * number + n)
    return root


def load(root: Path, split: str = "train", **options: Any) -> ImageSet:
    dataset = create_dataset("folder", split, root, **options)
    assert isinstance(dataset, ImageSet)
    return dataset


def test_classes_splits_and_sizes(folder: Path) -> None:
    parts = {split: load(folder, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 27, "val": 3, "test": 3}
    for part in parts.values():
        assert part.classes == ("cat", "dog", "eel")
        assert part.shape == (3, 25, 25)  # the median shorter side
        assert set(part.labels.tolist()) == {0, 1, 2}
    colours = [{tuple(image[:, 0, 0].tolist()) for image in part.images} for part in parts.values()]
    assert sum(map(len, colours)) == len(set.union(*colours)) == 33  # every image in one split, none twice
    again = create_dataset(str(folder), "test")  # a path is a name, too
    assert torch.equal(again.get_batch(torch.arange(3)).images, parts["test"].images)
    assert Loader(parts["train"], 8).batch(0, 0).images.shape == (8, 3, 25, 25)


def test_the_split_is_fixed_by_names_and_seed(folder: Path) -> None:
    def colours(**options: Any) -> set[tuple[int, ...]]:
        return {tuple(image[:, 0, 0].tolist()) for image in load(folder, "test", test=0.3, size=8, **options).images}

    before = colours()
    assert colours() == before
    assert colours(seed=1) != before
    for n in range(3):
        picture(folder / "cat" / f"new{n}.png", seed=500 + n)
    assert len(colours() & before) >= len(before) - 3


def test_folders_for_the_splits(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for split, count in (("Train", 4), ("validation", 2), ("test", 3)):
        for name in ("a", "b"):
            for n in range(count):
                picture(root / split / name / "deeper" / f"{n}.jpg", (40, 40))
    assert [len(load(root, split)) for split in ("train", "val", "test")] == [8, 4, 6]
    assert load(root).shape == (3, 40, 40)  # all of one size stay as they are
    for path in (root / "validation").rglob("*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match="a class without images"):
        load(root, "val")
    assert len(load(root)) == 8  # a split that nobody asked for may be broken
    os.rename(root / "validation", tmp_path / "elsewhere")
    with pytest.raises(DataError, match="has no folder for the split 'val': it has 'Train' and 'test'"):
        load(root, "val")
    picture(root / "test" / "c" / "1.jpg")
    with pytest.raises(DataError, match="has classes that train has not: 'c'"):
        load(root, "test")
    for path in (root / "test/c/1.jpg", *(root / "test/b/deeper").iterdir()):
        path.unlink()
    for name in ("c", "b/deeper", "b"):
        (root / "test" / name).rmdir()
    assert load(root, "test").labels.tolist() == [0, 0, 0]  # of the classes a and b one is enough
    assert load(root, "test").classes == ("a", "b")


def test_a_folder_beside_those_of_the_splits(tmp_path: Path) -> None:
    """It must not turn the splits into classes: the model would learn to tell training from test images."""
    root = tmp_path / "images"
    for split in ("train", "test"):
        for name in "ab":
            picture(root / split / name / "1.png")
    for junk in ("__MACOSX", "notes", "train/__pycache__"):
        (root / junk).mkdir()
    assert load(root).classes == ("a", "b")
    picture(root / "unlabeled/1.png")
    with pytest.warns(UserWarning, match="unlabeled is left out: it is none of the splits 'train' and 'test'"):
        assert load(root).classes == ("a", "b")


@pytest.mark.parametrize("folders", [("val", "test"), ("seg_train", "seg_test"), ("train_set", "other")])
def test_folders_that_look_like_splits_are_never_classes(tmp_path: Path, folders: tuple[str, str]) -> None:
    for split in folders:
        for name in "ab":
            picture(tmp_path / "images" / split / name / "1.png")
    with pytest.raises(
        DataError, match=r"no folder 'train' to learn from|Name the folders above them train, val and test"
    ):
        load(tmp_path / "images")


def test_classes_may_have_the_same_folders_in_them(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for year in ("2024", "2025"):
            picture(tmp_path / "images" / name / year / "1.png")
    assert load(tmp_path / "images", val=0, test=0).classes == ("cat", "dog")


def test_nested_files_of_one_name_are_split_at_random(tmp_path: Path) -> None:
    for n in range(40):
        for name in "ab":
            picture(tmp_path / "images" / name / f"subject{n:02}" / "img.png", (6, 6), seed=n)
    held = load(tmp_path / "images", "test", test=0.25).images[:, :, 0, 0]
    first = load(tmp_path / "images", val=0, test=0).images[:10, :, 0, 0]
    assert len({tuple(x.tolist()) for x in held[:10]} & {tuple(x.tolist()) for x in first}) < 8


def test_modes(tmp_path: Path) -> None:
    """Grey, palette, transparent, 16 bits, CMYK, sideways by EXIF: all come out as one would see them."""
    root = tmp_path / "images"
    grey = picture(root / "a/grey.png", mode="L").parent
    one = Image.open(grey / "grey.png").getpixel((0, 0))
    picture(root / "b/grey.png", mode="1")
    assert load(root, val=0, test=0).shape[0] == 1
    sixteen = Image.fromarray(np.full((20, 30), 40_000, np.uint16))
    sixteen.save(root / "b/sixteen.png")
    dataset = load(root, val=0, test=0)
    assert dataset.shape == (1, 20, 30)
    values = sorted(int(image[0, 5, 5]) for image in dataset.images)
    assert round(40_000 / 257) in values
    assert one in values
    Image.new("RGBA", (30, 20), (200, 0, 0, 0)).save(root / "a/clear.png")  # wholly transparent
    Image.new("RGB", (30, 20), (10, 200, 30)).convert("P").save(root / "a/palette.gif")
    Image.new("CMYK", (30, 20), (0, 255, 255, 0)).save(root / "b/ink.jpg")
    colour = load(root, val=0, test=0)
    assert colour.shape == (3, 20, 30)
    seen = {tuple(image[:, 5, 5].tolist()) for image in colour.images}
    assert colour.images[0, :, 5, 5].tolist() == [255, 255, 255]  # a/clear.png: white, not the red or black below
    assert any(g > 150 and r < 60 for r, g, b in seen)
    assert any(r > 200 and g < 60 for r, g, b in seen)
    assert load(root, val=0, test=0, channels="grey").shape == (1, 20, 30)


def test_sixteen_bits_come_down_by_one_rule(tmp_path: Path) -> None:
    """Not by what each image happens to hold: 255 of 65,535 is as dark as 256."""
    for name, levels in (("a", (200, 255, 256)), ("b", (300, 4_095, 33_000, 65_535))):
        for level in levels:
            path = picture(tmp_path / "images" / name / f"{level:05}.png")
            Image.fromarray(np.full((9, 9), level, np.uint16)).save(path)
    values = load(tmp_path / "images", val=0, test=0).images[:, 0, 4, 4].tolist()
    assert values == [round(level / 257) for level in (200, 255, 256, 300, 4_095, 33_000, 65_535)]


def test_small_images_that_all_lie_on_their_side_keep_their_shape(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (80, 40)).save(tmp_path / "images" / name / "1.jpg", exif=exif)
    assert load(tmp_path / "images").shape == (3, 80, 40)


def test_an_image_that_lies_on_its_side_is_set_upright(tmp_path: Path) -> None:
    root = tmp_path / "images"
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 255  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be affine_matrix clockwise by a quarter
    for name in "ab":
        (root / name).mkdir(parents=True)
        Image.fromarray(pixels).save(root / name / "1.png", exif=exif)
    image = load(root, size=16, val=0, test=0, fit="stretch").images[0, 0]
    assert int(image[2].min()) > 200  # white is above,
    assert int(image[13].max()) < 50  # black below


def test_fits(tmp_path: Path) -> None:
    root = tmp_path / "images"
    pixels = np.zeros((30, 90, 3), np.uint8)
    pixels[:, 30:60] = 255
    for name in "ab":
        (root / name).mkdir(parents=True)
        Image.fromarray(pixels).save(root / name / "1.png")
    means = {
        fit: float(load(root, size=30, val=0, test=0, fit=fit).images.float().mean())
        for fit in ("crop", "pad", "stretch")
    }
    assert means["crop"] == 255  # the middle
    assert 80 < means["stretch"] < 90  # a third of it white
    assert 25 < means["pad"] < 32  # a ninth


def test_a_corrupt_image_is_named_and_fatal_or_skipped(folder: Path) -> None:
    broken = [folder / "cat/bad.png", folder / "dog/cut.png"]
    broken[0].write_bytes(b"not an image")
    broken[1].write_bytes((folder / "dog/1.png").read_bytes()[:50])
    for options in ({}, {"size": 8, "channels": "colour"}):
        with pytest.raises(DataError) as error:
            load(folder, val=0, test=0, **options)
        sentence = str(error.value)
        assert "\n" not in sentence
        assert f"{broken[0]} (and 1 more) can't be read as an image" in sentence
        assert "broken='skip'" in sentence
        for _ in range(2):  # the second time from the cache
            with pytest.warns(
                UserWarning, match=r"2 of 35 images can't be read and are left out: .*bad\.png, .*cut\.png"
            ):
                dataset = load(folder, val=0, test=0, broken="skip", **options)
            assert len(dataset) == len(dataset.labels) == 33
            assert torch.bincount(dataset.labels).tolist() == [10, 11, 12]


def test_all_corrupt(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(b"no")
    for broken in ("skip", "fail"):
        with pytest.raises(DataError, match="none of 2 files can be read as an image"):
            load(tmp_path / "images", broken=broken)


def test_the_cache_is_used_and_made_anew(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, size=16, val=0, test=0)
    (kept,) = own_cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("torchcaps.data.images.read_image", None)  # whoever decodes now, fails
        assert torch.equal(load(folder, size=16, val=0, test=0).images, first.images)
    whole = kept.read_bytes()
    for spoilt in (whole[:1000], b"", b"no archive"):
        kept.write_bytes(spoilt)
        assert torch.equal(load(folder, size=16, val=0, test=0).images, first.images)
    changed = next(iter(sorted(folder.rglob("*.png"))))
    picture(changed, seed=999)
    os.utime(changed, ns=(1, 1))
    load(folder, size=16, val=0, test=0)
    assert len(list(own_cache.iterdir())) == 2
    load(folder, size=16, val=0, test=0, cache=False)
    assert len(list(own_cache.iterdir())) == 2
    for path in own_cache.iterdir():
        os.utime(path, (0, 0))  # nobody asked for them for a long time
    load(folder, size=17, val=0, test=0)
    assert len(list(own_cache.iterdir())) == 1


def test_what_could_not_be_read_today_is_not_remembered(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchcaps.data import images as pictures

    read = pictures.read_image

    def failing(path: Path, form: Any) -> torch.Tensor:
        if path.name == "1.png":
            raise OSError(5, "Input/output error")
        return read(path, form)

    monkeypatch.setattr(pictures, "read_image", failing)
    with pytest.warns(UserWarning, match="3 of 33 images can't be read"):
        load(folder, val=0, test=0, broken="skip")
    monkeypatch.setattr(pictures, "read_image", read)
    assert not list(own_cache.glob("*.pt"))
    assert len(load(folder, val=0, test=0, broken="skip")) == 33


def test_a_cache_that_can_only_be_read_is_used(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, size=16)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torchcaps.data.images.os.utime", refused)
    monkeypatch.setattr("torchcaps.data.images.read_image", None)  # whoever decodes now, fails
    assert torch.equal(load(folder, size=16).images, first.images)


def test_a_cache_that_cannot_be_written_is_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="can't be kept in"):
        assert len(load(folder)) == 27


def test_other_files_are_no_images(folder: Path) -> None:
    (folder / "cat/notes.txt").write_text("x")
    (folder / "cat/.hidden.png").write_text("x")
    (folder / ".git").mkdir()
    (folder / "readme.md").write_text("x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(folder)) == 27


def test_layouts_that_make_no_sense(tmp_path: Path, folder: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (None, "which one"),
        (tmp_path / "nowhere", "is no folder"),
        (folder / "cat", "has no sub-folders"),
        ("./nowhere", "is no folder"),
    ]
    for root, said in cases:
        with pytest.raises(DataError, match=said):
            create_dataset("folder", "train", root)
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match="empty is a class without images"):
        load(folder)
    picture(tmp_path / "lone/train/a/1.png")
    with pytest.raises(DataError, match="has one class, 'train', and there is nothing to tell it from: give it itself"):
        load(tmp_path / "lone")
    with pytest.raises(ValueError, match=r"\./nowhere is no folder, and no data set has that name"):
        create_dataset("./nowhere")
    picture(tmp_path / "one/only/1.png")
    with pytest.raises(DataError, match="has one class, 'only'"):
        load(tmp_path / "one")
    with pytest.raises(ValueError, match="give the folder of images once"):
        create_dataset(str(folder), root=folder)
    (folder / "empty").rmdir()
    with pytest.raises(DataError, match=r"the split 'val' of .* is empty"):
        load(folder, "val", val=0)
    for options, said in (
        ({"val": 0.6, "test": 0.4}, "leave something to train with"),
        ({"size": 0}, "size must be 1"),
    ):
        with pytest.raises(ValueError, match=said):
            Folder(**options)  # type: ignore[arg-type]


def test_tiny_classes_keep_one_to_learn_from(tmp_path: Path) -> None:
    for name, count in (("a", 1), ("b", 2), ("c", 3)):
        for n in range(count):
            picture(tmp_path / "images" / name / f"{n}.png", seed=n)
    for shares in ({"test": 0.4, "val": 0.1}, {"test": 0.45, "val": 0.5}, {"test": 0.5, "val": 0.45}):
        train = load(tmp_path / "images", **shares)
        assert sorted(set(train.labels.tolist())) == [0, 1, 2]


def test_every_class_of_three_or_more_is_tested(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 40)):
        for n in range(count):
            picture(tmp_path / "images" / name / f"{n}.png", (6, 6), seed=n)
    for split in ("val", "test"):
        assert torch.bincount(load(tmp_path / "images", split).labels).tolist() == [1, 4]


def test_many_images_do_not_mix(tmp_path: Path) -> None:
    """Decoded by several threads, each image keeps its place and label."""
    root = tmp_path / "images"
    for number, name in enumerate("abcd"):
        for n in range(40):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), 60 * number + n).save(root / name / f"{n:02}.png")
    dataset = load(root, val=0, test=0)
    values = dataset.images[:, 0, 4, 4].long()
    assert torch.equal(values // 60, dataset.labels)
    assert sorted(values.tolist()) == sorted(60 * number + n for number in range(4) for n in range(40))
