"""Data sets from files, each written here in the form its publisher uses, and batches from them."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from raysim import data
from raysim.config import DataConfig
from raysim.data import idx, loaders, parquet, pictures
from raysim.data.batches import augment, make_batch
from raysim.errors import ConfigError, DataError

SHARED = Path(__file__).parents[2] / "shared" / "data"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loaders, "DEBIAN", tmp_path / "not installed")


def pixels(count: int, size: int = 8, channels: int = 3) -> Any:
    shape = (count, size, size, channels) if channels > 1 else (count, size, size)
    return np.random.RandomState(count).randint(0, 256, shape).astype(np.uint8)


def png(picture: Any, mode: str | None = None) -> bytes:
    image = Image.fromarray(picture)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, encoded: list[Any], labels: Any, **names: str) -> Path:
    """As data hubs do: the image a struct {bytes, path}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    struct_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [None if e is None else {"bytes": e, "path": None} for e in encoded]
    columns = {
        names.get("image", "img"): pa.array(rows, struct_type),
        names.get("label", "label"): pa.array(labels),
    }
    pq.write_table(pa.table(columns), path)
    return path


def write_pair(folder: Path, size: int = 8, channels: int = 3) -> tuple[Any, Any]:
    train, test = pixels(6, size, channels), pixels(3, size, channels)
    write_parquet(folder / "train.parquet", list(map(png, train)), [0, 1, 2, 3, 4, 5])
    write_parquet(folder / "test.parquet", list(map(png, test)), [9, 8, 7])
    return train, test


def test_a_parquet_folder_under_root_is_read_in_order(tmp_path: Path) -> None:
    train, test = write_pair(tmp_path / "cifar10")
    dataset = data.load(DataConfig(name="cifar10", root=tmp_path))
    assert np.array_equal(dataset.images, np.concatenate([train, test]).transpose(0, 3, 1, 2))
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4, 5, 9, 8, 7]
    assert (dataset.num_train, dataset.num_classes) == (6, 10)
    assert dataset.images.flags.c_contiguous
    assert not dataset.images.flags.writeable


def test_shards_with_the_names_of_data_hubs_are_joined(tmp_path: Path) -> None:
    folder = tmp_path / "cifar100" / "data"
    encoded = list(map(png, pixels(3)))
    for shard in (1, 0):
        path = folder / f"train-0000{shard}-of-00002.parquet"
        write_parquet(path, encoded, [10 * shard, 1, 2], label="fine_label")
    write_parquet(folder / "test-00000-of-00001.parquet", encoded, [5, 6, 7], label="fine_label")
    dataset = data.load(DataConfig(name="cifar100", root=tmp_path))
    assert dataset.labels.tolist() == [0, 1, 2, 10, 1, 2, 5, 6, 7]
    assert dataset.num_train == 6


def test_plain_binary_and_other_column_names_are_found_by_type(tmp_path: Path) -> None:
    table = {
        "name": ["a", "b"],
        "picture": list(map(png, pixels(2))),
        "target": pa.array([1, 0], pa.int8()),
    }
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    dataset = data.load(DataConfig(name=f"parquet:{tmp_path / 'x.parquet'}"))
    assert dataset.labels.tolist() == [1, 0]
    assert dataset.images.shape == (2, 3, 8, 8)


def test_named_columns_win_over_others_of_their_type(tmp_path: Path) -> None:
    encoded = list(map(png, pixels(2)))
    table = {"mask": encoded[::-1], "image": encoded, "id": [7, 8], "label": [0, 1]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    dataset = data.load(DataConfig(name=f"parquet:{tmp_path / 'x.parquet'}"))
    assert np.array_equal(dataset.images[0], pixels(2)[0].transpose(2, 0, 1))
    assert dataset.labels.tolist() == [0, 1]


def test_one_parquet_file_is_all_training_part(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x.parquet", list(map(png, pixels(6))), [0, 1, 2, 0, 1, 2])
    config = DataConfig(name=f"parquet:{file}", test="official", partition="iid")
    dataset = data.load(config)
    assert (dataset.num_train, dataset.num_classes) == (6, 3)
    with pytest.raises(DataError, match=r"does not have; try --data.test split"):
        data.split(dataset.labels, dataset.num_train, dataset.num_classes, 2, config, 0)


def test_gray_pictures_stay_gray_unless_one_has_color(tmp_path: Path) -> None:
    gray = list(map(png, pixels(2, channels=1)))
    file = write_parquet(tmp_path / "x.parquet", gray, [0, 1])
    dataset = data.load(DataConfig(name=f"parquet:{file}"))
    assert dataset.images.shape == (2, 1, 8, 8)
    assert dataset.mean == (0.5,)
    color = png(pixels(1)[0])
    file = write_parquet(tmp_path / "y.parquet", [*gray, color], [0, 1, 1])
    images = data.load(DataConfig(name=f"parquet:{file}")).images
    assert np.array_equal(images[0], np.stack([pixels(2, channels=1)[0]] * 3))
    assert np.array_equal(images[2], pixels(1)[0].transpose(2, 0, 1))


def test_palettes_and_transparency_become_color(tmp_path: Path) -> None:
    square = np.zeros((8, 8, 3), dtype=np.uint8) + np.array([200, 100, 0], dtype=np.uint8)
    clear = Image.fromarray(square).convert("P")
    buffer = io.BytesIO()
    clear.save(buffer, "PNG", transparency=b"\0\xff")
    encoded = [png(square, "P"), png(square, "RGBA"), buffer.getvalue()]
    file = write_parquet(tmp_path / "x.parquet", encoded, [0, 1, 0])
    images = data.load(DataConfig(name=f"parquet:{file}")).images
    assert images.shape == (3, 3, 8, 8)
    assert np.array_equal(images[1], square.transpose(2, 0, 1))


def test_pictures_of_two_sizes_need_an_image_size(tmp_path: Path) -> None:
    encoded = [png(pixels(1, 8)[0]), png(pixels(1, 12)[0])]
    file = write_parquet(tmp_path / "x.parquet", encoded, [0, 1])
    name = f"parquet:{file}"
    with pytest.raises(
        DataError, match=r"row 1 of .* is 12 x 12, but row 0 .* is 8 x 8; --data.im"
    ):
        data.load(DataConfig(name=name))
    assert data.load(DataConfig(name=name, image_size=10)).images.shape == (2, 3, 10, 10)


def test_oblong_pictures_need_an_image_size(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x.parquet", [png(pixels(1)[0][:5])], [0])
    with pytest.raises(DataError, match=r"row 0 of .* is 8 x 5, .* --data.image-size 5"):
        data.load(DataConfig(name=f"parquet:{file}"))


def test_a_broken_picture_names_its_file_and_row(tmp_path: Path) -> None:
    encoded = list(map(png, pixels(3)))
    for broken in (b"", b"not a picture", encoded[1][:60], encoded[1][:-30]):
        file = write_parquet(tmp_path / "x.parquet", [encoded[0], broken, encoded[2]], [0, 1, 2])
        with pytest.raises(DataError, match=rf"row 1 of {file} is not a readable picture"):
            data.load(DataConfig(name=f"parquet:{file}"))


def test_deep_pictures_are_refused(tmp_path: Path) -> None:
    deep = png(np.zeros((8, 8), dtype=np.uint16))
    file = write_parquet(tmp_path / "x.parquet", [deep], [0])
    with pytest.raises(DataError, match="mode I;16; raysim reads 8-bit"):
        data.load(DataConfig(name=f"parquet:{file}"))


def test_missing_values_name_their_row(tmp_path: Path) -> None:
    encoded: list[Any] = list(map(png, pixels(3)))
    file = write_parquet(tmp_path / "x.parquet", encoded, [0, None, 2])
    with pytest.raises(DataError, match=r"row 1 of .* has no label"):
        data.load(DataConfig(name=f"parquet:{file}"))
    file = write_parquet(tmp_path / "x.parquet", [*encoded[:2], None], [0, 1, 2])
    with pytest.raises(DataError, match=r"row 2 of .* has no img"):
        data.load(DataConfig(name=f"parquet:{file}"))
    file = write_parquet(tmp_path / "x.parquet", encoded, [0, 1, -1])
    with pytest.raises(DataError, match=r"row 2 of .* has label -1"):
        data.load(DataConfig(name=f"parquet:{file}"))
    file = write_parquet(tmp_path / "x.parquet", [], pa.array([], pa.int64()))
    with pytest.raises(DataError, match="has no rows"):
        data.load(DataConfig(name=f"parquet:{file}"))


def test_wrong_columns_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    encoded = list(map(png, pixels(2)))
    tables: list[tuple[dict[str, Any], str]] = [
        ({"text": ["a", "b"], "label": [0, 1]}, r"no column of encoded pictures .*text: string"),
        ({"img": encoded, "label": [[0], [1]]}, r"no column of labels .*label: list<"),
        ({"img": encoded, "a": [0, 1], "b": [0, 1]}, r"several columns of labels .*call it fine"),
    ]
    for table, message in tables:
        pq.write_table(pa.table(table), file)
        with pytest.raises(DataError, match=message):
            data.load(DataConfig(name=f"parquet:{file}"))


def test_a_torn_parquet_file_is_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x.parquet", list(map(png, pixels(3))), [0, 1, 2])
    whole = file.read_bytes()
    for torn in (b"", whole[:40], whole[:-20]):
        file.write_bytes(torn)
        with pytest.raises(DataError, match=rf"{file} is not a readable Parquet file"):
            data.load(DataConfig(name=f"parquet:{file}"))


def test_labels_beyond_a_known_set_are_an_error(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / "svhn" / f"{part}.parquet", list(map(png, pixels(2))), [0, 12])
    with pytest.raises(DataError, match=r"svhn has 10 classes, but sample 1 of .* has label 12"):
        data.load(DataConfig(name="svhn", root=tmp_path))


def test_decoded_pictures_are_cached_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "cifar10")
    config = DataConfig(name="cifar10", root=tmp_path)
    first = data.load(config)
    decode = pictures.decode
    monkeypatch.setattr(pictures, "decode", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(data.load(config).images, first.images)
    monkeypatch.setattr(pictures, "decode", decode)
    write_parquet(tmp_path / "cifar10/test.parquet", list(map(png, pixels(4))), [0, 1, 2, 3])
    os.utime(tmp_path / "cifar10/test.parquet", (1, 1))
    assert len(data.load(config).images) == 10


def write_idx(folder: Path, size: int = 28, zipped: bool = True) -> Any:
    """Magic number, big-endian dimensions, bytes; 5 training and 2 test samples."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    for count, part in ((5, "train"), (2, "t10k")):
        images, labels = pixels(count, size, 1), np.arange(count, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            raw = struct.pack(">4B", 0, 0, 8, array.ndim)
            raw += struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            file = folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(raw) if zipped else raw)
        arrays.append(images)
    return np.concatenate(arrays)


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion_mnist", "fashion-mnist"])
@pytest.mark.usefixtures("no_debian")
def test_fashion_mnist_is_read_from_idx_files(tmp_path: Path, place: str) -> None:
    images = write_idx(tmp_path / place, zipped=place != "fashion_mnist")
    dataset = data.load(DataConfig(name="fashion_mnist", root=tmp_path, image_size=28))
    assert np.array_equal(dataset.images[:, 0], images)
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert dataset.num_train == 5
    resized = data.load(DataConfig(name="fashion_mnist", root=tmp_path))
    assert resized.images.shape == (7, 1, 32, 32)
    assert (resized.task.channels, resized.task.image_size) == (1, 32)


@pytest.mark.usefixtures("no_debian")
def test_fashion_mnist_as_parquet_is_gray_and_32_pixels(tmp_path: Path) -> None:
    write_pair(tmp_path / "fashion_mnist", size=28, channels=1)
    dataset = data.load(DataConfig(name="fashion_mnist", root=tmp_path))
    assert dataset.images.shape == (9, 1, 32, 32)


def test_torn_idx_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    torn_inside = gzip.compress(gzip.decompress(whole)[:-1])
    for torn in (b"", whole[:100], b"text", gzip.compress(b"text"), torn_inside):
        file.write_bytes(torn)
        with pytest.raises(DataError, match=rf"{file} .*fresh copy"):
            idx.read_array(file)
    file.write_bytes((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    source = idx.find(tmp_path)
    assert source is not None
    with pytest.raises(DataError, match=r"shape \(2, 28, 28\), and its labels \(5,\)"):
        source.read(None)


@pytest.mark.skipif(not loaders.DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_needs_no_root() -> None:
    dataset = data.load(DataConfig(name="fashion_mnist"))
    assert dataset.images.shape == (70_000, 1, 32, 32)
    assert (np.bincount(dataset.labels) == 7000).all()
    assert (np.bincount(dataset.labels[:60_000]) == 6000).all()
    assert dataset.labels[:4].tolist() == [9, 0, 0, 3]


def write_cifar(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CIFAR's pickles, two pictures each, with torchvision told their checksums."""
    from zoo.torchvision_shim import import_torchvision

    cls = getattr(import_torchvision().datasets, kind)
    folder = root / cls.base_folder
    folder.mkdir()
    rows = pixels(2).reshape(2, -1)[:, :192]
    big = np.tile(rows, (1, 16))  # (2, 3072)
    key = "fine_labels" if kind == "CIFAR100" else "labels"

    def write(name: str, content: Any) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    for part in ("train_list", "test_list"):
        lists = [write(name, {"data": big, key: [1, 2]}) for name, _ in getattr(cls, part)]
        monkeypatch.setattr(cls, part, lists)
    meta = dict(cls.meta)
    meta["md5"] = write(meta["filename"], {meta["key"]: ["a", "b", "c"]})[1]
    monkeypatch.setattr(cls, "meta", meta)
    return big.reshape(2, 3, 32, 32)


@pytest.mark.parametrize(("name", "num_train"), [("cifar10", 10), ("cifar100", 2)])
def test_cifar_is_read_from_the_files_torchvision_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_train: int
) -> None:
    images = write_cifar(tmp_path, name.upper(), monkeypatch)
    dataset = data.load(DataConfig(name=name, root=tmp_path))
    assert dataset.num_train == num_train
    assert dataset.labels.tolist() == [1, 2] * (num_train // 2 + 1)
    assert np.array_equal(dataset.images[:2], images)
    assert np.array_equal(dataset.images[-2:], images)


def test_corrupt_cifar_files_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "CIFAR10", monkeypatch)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"torchvision cannot read CIFAR10 in .*fresh copies"):
        data.load(DataConfig(name="cifar10", root=tmp_path))


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SVHN's two .mat files in name only; torchvision is told their checksum."""
    from zoo.torchvision_shim import import_torchvision

    cls = import_torchvision().datasets.SVHN
    split_list = {}
    for part in ("train", "test"):
        (root / f"{part}_32x32.mat").write_text(part)
        checksum = hashlib.md5(part.encode()).hexdigest()
        split_list[part] = ["", f"{part}_32x32.mat", checksum]
    monkeypatch.setattr(cls, "split_list", split_list)


def test_svhn_is_read_from_the_files_torchvision_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In them the sample comes last, and the digit 0 is labeled 10."""
    write_svhn(tmp_path, monkeypatch)
    images = pixels(3, 32)
    content = {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9]])}
    scipy, scipy_io = ModuleType("scipy"), ModuleType("scipy.io")
    scipy.io, scipy_io.loadmat = scipy_io, lambda _: content  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scipy", scipy)
    monkeypatch.setitem(sys.modules, "scipy.io", scipy_io)
    dataset = data.load(DataConfig(name="svhn", root=tmp_path))
    assert np.array_equal(dataset.images[:3], images.transpose(0, 3, 1, 2))
    assert dataset.labels.tolist() == [0, 1, 9, 0, 1, 9]
    assert dataset.num_train == 3
    assert dataset.images.flags.c_contiguous


def test_svhn_files_say_that_they_need_scipy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_svhn(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(DataError, match="pip install scipy"):
        data.load(DataConfig(name="svhn", root=tmp_path))


def write_tiny_imagenet(folder: Path) -> None:
    """Two classes; the alphabetically second has the first validation picture."""
    for wnid in ("n02", "n01"):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for number in range(2):
            path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            Image.fromarray(pixels(1, 64)[0]).save(path, "JPEG")
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for number, wnid in enumerate(("n02", "n01", "n02")):
        shade = np.full((64, 64), 40 * number, dtype=np.uint8)  # gray, as some are
        Image.fromarray(shade).save(folder / "val" / "images" / f"val_{number}.JPEG", "JPEG")
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def test_tiny_imagenet_takes_validation_classes_from_the_annotations(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    dataset = data.load(DataConfig(name="tiny_imagenet", root=tmp_path))
    assert dataset.images.shape == (7, 3, 64, 64)
    assert dataset.labels.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert (dataset.num_train, dataset.num_classes) == (4, 200)
    assert dataset.images[4:].mean(axis=(1, 2, 3)).tolist() == [0, 40, 80]


def test_tiny_imagenet_says_what_is_broken(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    write_tiny_imagenet(folder)
    config = DataConfig(name="tiny_imagenet", root=tmp_path)
    (folder / "train/n01/images/n01_0.JPEG").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"n01_0.JPEG is not a readable picture"):
        data.load(config)
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn07\n")
    with pytest.raises(DataError, match=r"line 1 of .* says that 'val_0.JPEG' is a 'n07'"):
        data.load(config)
    (folder / "val/val_annotations.txt").unlink()
    with pytest.raises(DataError, match=r"val_annotations.txt is missing"):
        data.check(config)


@pytest.mark.usefixtures("no_debian")
@pytest.mark.parametrize("name", [name for name in data.names() if name != "shapes"])
def test_a_missing_set_is_an_error_that_says_how_to_get_it(tmp_path: Path, name: str) -> None:
    ways = {"fashion_mnist": "apt-get install dataset-fashion-mnist", "tiny_imagenet": "zip file"}
    for root, found in ((tmp_path, f"not in --data.root {tmp_path}"), (None, "is not set")):
        with pytest.raises(DataError, match=found) as caught:
            data.check(DataConfig(name=name, root=root))
        assert f"--data.root FOLDER with {name}/train.parquet" in str(caught.value)
        assert ways.get(name, "download=True") in str(caught.value)
        with pytest.raises(DataError) as again:
            data.load(DataConfig(name=name, root=root))
        assert str(again.value) == str(caught.value)


def test_names_and_places_are_checked_without_reading(tmp_path: Path) -> None:
    assert data.names() == sorted(data.names())
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar11' in --data.name; did you"):
        data.check(DataConfig(name="cifar11"))
    with pytest.raises(DataError, match=r"--data.root .*nowhere is not a folder"):
        data.check(DataConfig(name="cifar10", root=tmp_path / "nowhere"))
    with pytest.raises(DataError, match="does not exist; parquet:PATH takes"):
        data.check(DataConfig(name=f"parquet:{tmp_path / 'nowhere'}"))
    with pytest.raises(DataError, match=r"has no train.parquet; parquet:PATH takes"):
        data.check(DataConfig(name=f"parquet:{tmp_path}"))
    with pytest.raises(ConfigError, match=r"--data.image-size must be at least 1, got 0"):
        data.check(DataConfig(image_size=0))
    write_parquet(tmp_path / "svhn" / "train.parquet", [png(pixels(1)[0])], [0])
    with pytest.raises(DataError, match=r"train.parquet is there, but no test.parquet"):
        data.check(DataConfig(name="svhn", root=tmp_path))


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="no shared CIFAR-10")
def test_shared_cifar10_has_the_columns_of_a_data_hub(tmp_path: Path) -> None:
    data.check(DataConfig(name="cifar10", root=SHARED))
    table = pq.ParquetFile(SHARED / "cifar10" / "test.parquet").read_row_group(0).slice(0, 100)
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = data.load(DataConfig(name=f"parquet:{tmp_path / 'x.parquet'}"))
    assert dataset.images.shape == (100, 3, 32, 32)
    assert dataset.labels[:5].tolist() == [3, 8, 8, 0, 6]


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="no shared CIFAR-10")
def test_shared_cifar10_is_whole() -> None:
    dataset = data.load(DataConfig(name="cifar10", root=SHARED))
    assert dataset.images.shape == (60_000, 3, 32, 32)
    assert (np.bincount(dataset.labels[:50_000]) == 5000).all()
    means = dataset.images[:50_000].mean(axis=(0, 2, 3)) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def small_set() -> data.Dataset:
    images = pixels(5).transpose(0, 3, 1, 2).copy()
    images.setflags(write=False)
    labels = np.array([4, 3, 2, 1, 0])
    labels.setflags(write=False)
    return data.Dataset("s", images, labels, 4, 5, mean=(0.5, 0.4, 0.3), std=(0.5, 0.2, 0.1))


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_a_batch_is_normalized_by_channel_and_leaves_the_set_alone(memory_format: str) -> None:
    dataset = small_set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it is given a read-only array
        x, y = make_batch(dataset, np.array([3, 0]), CPU, memory_format)
    expected = dataset.images[[3, 0]] / 255
    expected = (expected - np.reshape(dataset.mean, (3, 1, 1))) / np.reshape(dataset.std, (3, 1, 1))
    assert x.dtype == torch.float32
    assert np.allclose(x.numpy(), expected, atol=1e-5)
    assert y.tolist() == [1, 4]
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert x.is_contiguous(memory_format=layout)
    x.zero_()
    assert dataset.images.any()


@pytest.mark.parametrize("channels_last", [False, True])
def test_augmentation_crops_and_flips_each_image_on_its_own(channels_last: bool) -> None:
    """Found again among the 9 x 9 x 2 views that padding by 4 allows."""
    x = torch.rand(40, 3, 8, 8) + 1
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    torch.manual_seed(0)
    seen = augment(x, "crop_flip")
    assert seen.is_contiguous(memory_format=layout)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    found = set()
    for view, image in zip(seen, padded, strict=True):
        for down in range(9):
            for right in range(9):
                crop = image[:, down : down + 8, right : right + 8]
                found |= {(down, right, False)} if torch.equal(view, crop) else set()
                found |= {(down, right, True)} if torch.equal(view, crop.flip(2)) else set()
    assert len(found) > 25
    assert {flip for _, _, flip in found} == {True, False}
    torch.manual_seed(0)
    assert torch.equal(augment(x, "crop_flip"), seen)


def test_flip_turns_about_half_of_the_images() -> None:
    x = torch.rand(200, 1, 4, 4)
    torch.manual_seed(0)
    seen = augment(x, "flip")
    turned = [torch.equal(a, b.flip(2)) for a, b in zip(seen, x, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(seen, x, strict=True)]
    assert sum(turned) + sum(kept) == 200
    assert 70 < sum(turned) < 130
    assert augment(x, "none") is x


def test_a_file_named_train_is_found_before_its_shards(tmp_path: Path) -> None:
    for name in ("train.parquet", "train-00000-of-00001.parquet", "validation.parquet"):
        write_parquet(tmp_path / name, [png(pixels(1)[0])], [0])
    files = parquet.find(tmp_path)
    assert files == ((tmp_path / "train.parquet",), (tmp_path / "validation.parquet",))
