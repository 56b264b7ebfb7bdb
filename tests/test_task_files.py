"""Sentences as numbers, and the Parquet files of other tasks than single labels."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from raysim.data import task_files, words
from raysim.data.batches import make_batch
from raysim.data.dataset import Dataset
from raysim.errors import ConfigError, DataError
from raysim.task import Task

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


def picture(value: int, size: int = 4, mode: str = "RGB") -> dict[str, Any]:
    buffer = io.BytesIO()
    fill = value if mode == "L" else (value,) * 3
    Image.new(mode, (size, size), fill).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": ""}


def write(root: Path, name: str, train: dict[str, list[Any]], test: dict[str, list[Any]]) -> Path:
    for part, columns in (("train", train), ("test", test)):
        file = root / task_files.FILES[name].format(part)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), file)
    return root


# Words


def test_a_word_has_one_number_wherever_it_stands() -> None:
    tokens, count = words.encode(["A cat, a dog.", "the cat"], 6)
    assert tokens.shape == (2, 6)
    assert count == words.WORDS
    a, cat, comma, again, dog, stop = tokens[0]
    assert a == again
    assert len({a, cat, comma, dog, stop}) == 5
    assert tokens[1, 1] == cat
    assert tokens[1, 2:].tolist() == [0] * 4
    assert 0 < tokens[0].min() <= tokens.max() < count


def test_long_sentences_are_cut_and_empty_ones_are_padding() -> None:
    tokens, _ = words.encode(["one two three", ""], 2)
    assert (tokens[0] > 0).all()
    assert tokens[1].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="text-length must be at least 1"):
        words.encode(["a"], 0)


# Files


def test_several_labels_a_picture(tmp_path: Path) -> None:
    root = write(
        tmp_path, "coco_multilabel",
        {"image": [picture(10), picture(200), picture(30)], "labels": [[0, 1], [0], [0, 2]]},
        {"image": [picture(40)], "labels": [[2]]},
    )  # fmt: skip
    (root / "coco_multilabel" / "names.json").write_text(json.dumps(["cup", "dog", "tree"]))
    read = task_files.read("coco_multilabel", root, 2)
    assert read["targets"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]]
    assert read["labels"].tolist() == [1, 0, 2, 2]  # the rarest: 3 cups, 1 dog, 2 trees
    assert read["captions"].tolist() == ["a cup and a dog", "a cup", "a cup and a tree", "a tree"]
    assert read["images"].shape == (4, 3, 2, 2)
    assert read["images"][:, 0, 0, 0].tolist() == [10, 200, 30, 40]
    assert int(read["num_train"]) == 3


def test_masks_are_resized_without_mixing_their_classes(tmp_path: Path) -> None:
    pixels = np.array([[1, 1, 3, 3]] * 2 + [[2, 2, 3, 3]] * 2, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    row = {"image": [picture(1)], "mask": [{"bytes": buffer.getvalue(), "path": ""}], "label": [36]}
    read = task_files.read("pets", write(tmp_path, "pets", row, row), 2)
    assert read["targets"][0].tolist() == [[0, 2], [1, 2]]
    assert read["labels"].tolist() == [36, 36]


def test_sentences(tmp_path: Path) -> None:
    root = write(
        tmp_path, "trec", {"text": ["Who ?", "Where ?"], "label": [3, 4]},
        {"text": ["What ?"], "label": [2]},
    )  # fmt: skip
    read = task_files.read("trec", root, 32)
    assert read["captions"].tolist() == ["Who ?", "Where ?", "What ?"]
    assert read["labels"].tolist() == [3, 4, 2]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="trec needs --data.root FOLDER with text/trec_train"):
        task_files.find("trec", None)
    with pytest.raises(DataError, match="pets/train.parquet does not exist"):
        task_files.find("pets", tmp_path)
    root = write(tmp_path, "sst2", {"text": ["a"]}, {"text": ["a"]})
    with pytest.raises(DataError, match="no column label of classes"):
        task_files.read("sst2", root, 32)
    write(tmp_path, "sst2", {"text": ["a"], "label": [None]}, {"text": ["a"], "label": [1]})
    with pytest.raises(DataError, match="rows without label"):
        task_files.read("sst2", root, 32)
    row = {"image": [picture(1)], "mask": [picture(9, mode="L")], "label": [0]}
    with pytest.raises(DataError, match="other values than 1, 2 and 3"):
        task_files.read("pets", write(tmp_path, "pets", row, row), 4)
    row = {"image": [picture(1)], "labels": [[5]]}
    write(tmp_path, "coco_multilabel", row, row)
    with pytest.raises(DataError, match="names.json must list"):
        task_files.read("coco_multilabel", tmp_path, 4)
    (tmp_path / "coco_multilabel" / "names.json").write_text('["cup"]')
    with pytest.raises(DataError, match="classes \\[5\\]"):
        task_files.read("coco_multilabel", tmp_path, 4)


# Batches


def test_batches_of_every_kind() -> None:
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 2, 2)
    half = (0.5,) * 3
    one = Dataset("set", images, np.array([1, 0]), 2, 2, half, half)
    rows = np.array([1, 0])
    x, y = make_batch(one, rows, CPU)
    assert y.tolist() == [0, 1]
    several = replace(one, kind="multilabel", targets=np.array([[0, 1], [1, 1]], dtype=np.uint8))
    same, answers = make_batch(several, rows, CPU)
    assert torch.equal(same, x)
    assert answers.tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert several.task == Task(2, 3, 2, "multilabel")
    masks = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    pixels = replace(one, kind="segment", targets=masks, num_classes=8)
    assert make_batch(pixels, rows, CPU)[1].tolist() == [[[4, 5], [6, 7]], [[0, 1], [2, 3]]]
    tokens = np.array([[5, 0], [6, 7]])
    text = Dataset("text", tokens, np.array([1, 0]), 2, 2, (), (), "text", words=8)
    x, y = make_batch(text, rows, CPU)
    assert (x.tolist(), y.tolist()) == ([[6, 7], [5, 0]], [0, 1])
    assert text.task == Task(2, kind="text", words=8, length=2)
