"""The embedded set: always the same, not linear, and easy enough for a small network."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import data
from raysim.config import DataConfig
from raysim.data import cache, shapes
from raysim.errors import ConfigError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_loads_without_any_file() -> None:
    dataset = data.load(DataConfig(samples=1200))
    assert dataset.images.shape == (1200, 3, 32, 32)
    assert dataset.images.dtype == np.uint8
    assert dataset.images.flags.c_contiguous
    assert not dataset.images.flags.writeable
    assert dataset.labels.dtype == np.int64
    assert dataset.num_train == 1000
    assert (dataset.task.num_classes, dataset.task.channels, dataset.task.image_size) == (10, 3, 32)
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)


def test_it_is_the_same_every_time() -> None:
    once, again = shapes.draw(600, 10), shapes.draw(600, 10)
    assert np.array_equal(once["images"], again["images"])
    assert np.array_equal(once["labels"], again["labels"])


def test_the_first_samples_do_not_depend_on_how_many_follow() -> None:
    few, many = shapes.draw(130, 10), shapes.draw(1100, 10)
    assert np.array_equal(few["images"], many["images"][:130])
    assert np.array_equal(few["labels"], many["labels"][:130])


@pytest.mark.parametrize("num_classes", [2, 7, 10, 13, 100])
def test_classes_are_balanced(num_classes: int) -> None:
    counts = np.bincount(shapes.draw(2000, num_classes)["labels"], minlength=num_classes)
    assert len(counts) == num_classes
    assert counts.max() - counts.min() <= 1


def test_no_two_images_are_alike() -> None:
    images = shapes.draw(2000, 10)["images"]
    assert len({image.tobytes() for image in images}) == 2000
    assert 0.05 < images.std() / 255 < 0.4


def test_other_sizes_are_drawn_as_such() -> None:
    dataset = data.load(DataConfig(samples=20, image_size=64))
    assert dataset.images.shape == (20, 3, 64, 64)
    assert dataset.task.image_size == 64


def test_the_second_load_reads_the_cache(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load(DataConfig(samples=60))
    assert [path.name for path in cache_folder.iterdir()] == ["shapes-v1-10-60.npz"]
    monkeypatch.setattr(shapes, "draw", lambda *_: pytest.fail("drawn again"))
    assert np.array_equal(data.load(DataConfig(samples=60)).images, first.images)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_torn_cache_is_drawn_again(cache_folder: Path, damage: str) -> None:
    first = data.load(DataConfig(samples=60))
    file = cache_folder / "shapes-v1-10-60.npz"
    whole = file.read_bytes()
    middle = len(whole) // 2
    torn = {
        "cut": whole[:middle],
        "flip": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
        "text": b"not an archive",
    }
    file.write_bytes(torn[damage])
    assert np.array_equal(data.load(DataConfig(samples=60)).images, first.images)
    assert file.read_bytes() == whole


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "file" / "cache"))
    assert len(data.load(DataConfig(samples=60)).images) == 60


def test_the_cache_follows_the_users_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/raysim")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache.folder() == Path("/home/user/.cache/raysim")


def test_impossible_numbers_name_their_flag() -> None:
    with pytest.raises(ConfigError, match=r"--data.classes must lie in 2 .. 100, got 101"):
        data.check(DataConfig(classes=101))
    with pytest.raises(ConfigError, match=r"--data.samples must be at least 2, got 1"):
        data.load(DataConfig(samples=1))


def cnn1(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Sequential(nn.Linear(800, 2000), nn.ReLU(), nn.Linear(2000, 500), nn.ReLU()),
        nn.Linear(500, num_classes),
    )


def accuracy_after(
    model: nn.Module, num_samples: int, num_classes: int, epochs: int, lr: float
) -> float:
    """Accuracy on the last sixth of the samples after training on the others."""
    arrays = shapes.draw(num_samples, num_classes)
    x = torch.from_numpy(arrays["images"]).float().div_(127.5).sub_(1)
    y = torch.from_numpy(arrays["labels"])
    num_train = num_samples * 5 // 6
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(num_train).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        correct: Tensor = model(x[num_train:]).argmax(dim=1) == y[num_train:]
    return float(correct.float().mean())


def test_a_small_network_tells_two_classes_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 2)
    )
    assert accuracy_after(model, 1200, 2, epochs=5, lr=3e-3) > 0.7


@pytest.mark.slow
def test_a_linear_model_fails_where_cnn1_learns() -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    assert 0.2 < accuracy_after(linear, 14_400, 10, epochs=15, lr=1e-3) < 0.4
    assert accuracy_after(cnn1(10), 14_400, 10, epochs=6, lr=1e-3) > 0.75
