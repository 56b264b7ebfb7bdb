"""Clients with different tasks: their data, models, metrics and records, through whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim import Config, data
from raysim.config import DataConfig, FleetConfig, TrainConfig
from raysim.data import multitask
from raysim.errors import ConfigError, DataError
from raysim.result import Result, run

FOUR = ("scenes_single", "scenes_multilabel", "scenes_segment", "scenes_text")
MODELS = ("mlp", "cnn5", "unet_slim", "word_bag")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def settings(**changes: Any) -> DataConfig:
    given = {"tasks": FOUR, "samples": 120, "public": 20, "text_length": 12, "name": "scenes"}
    return DataConfig(**(given | changes))


def config(out: Path, method: str = "local", **changes: Any) -> Config:
    given: dict[str, Any] = {
        "clients": 6, "participation": 1.0, "rounds": 2, "backend": "local", "out": out,
        "data": settings(), "fleet": FleetConfig(models=MODELS, feature_dim=32),
        "train": TrainConfig(batch_size=16), "checkpoint_every": 0,
    }  # fmt: skip
    return Config(method=method, **(given | changes))


class Silent:
    """A console that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def finished(config: Config) -> Result:
    return run(config, console=Silent())  # type: ignore[arg-type]


# Data


def test_every_client_has_samples_of_its_own_task() -> None:
    mixed = multitask.load(settings())
    split = multitask.split(mixed, 6, settings(), seed=0)
    kinds = [mixed.of(client).kind for client in range(6)]
    assert kinds == ["single", "multilabel", "segment", "text", "single", "multilabel"]
    seen: list[int] = []
    for client in range(6):
        rows = np.concatenate([split.train(client), split.test(client)])
        own = mixed.own(client, rows)
        assert ((own >= 0) & (own < len(mixed.of(client).labels))).all()
        assert (mixed.labels[rows] == mixed.of(client).labels[own]).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(4 * 120))


def test_the_public_set_is_seen_as_images_and_as_captions_of_the_same_scenes() -> None:
    mixed = multitask.load(settings())
    split = multitask.split(mixed, 4, settings(), seed=0)
    assert split.public.tolist() == list(range(20))
    images, captions = mixed.public_of(0), mixed.public_of(3)
    assert images is not None
    assert captions is not None
    assert mixed.public_of(1) is mixed.public_of(2) is images
    assert images.images.shape == (20, 3, 32, 32)
    assert captions.images.shape == (20, 12)
    assert set(images.labels) == set(captions.labels) == {-1}
    single = mixed.of(0)
    assert not any(
        (picture == single.images).all(axis=(1, 2, 3)).any() for picture in images.images
    )


def test_public_samples_of_a_tasks_own_set_are_kept_from_its_clients() -> None:
    given = settings(name="shapes", tasks=("shapes", "scenes_segment"))
    mixed = multitask.load(given)
    split = multitask.split(mixed, 4, given, seed=1)
    held = {int(row) for client in (0, 2) for row in (*split.train(client), *split.test(client))}
    assert len(held) == 100
    assert not held & set(split.public.tolist())


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown task 'scenes_txt' in --data.tasks; did you"):
        data.check(settings(tasks=("scenes_txt",)))
    with pytest.raises(DataError, match="pets needs --data.root"):
        data.check(settings(tasks=("pets",)))
    with pytest.raises(ConfigError, match="has images only.*--data.name scenes or coco"):
        multitask.load(settings(name="shapes", tasks=("scenes_text",)))


# Runs


def test_local_learns_every_task_and_records_its_metrics(tmp_path: Path) -> None:
    result = finished(config(tmp_path / "run"))
    rows = [row for row in result.tasks.to_pylist() if row["round"] == 2]
    found = {(row["client"], row["task"], row["metric"]) for row in rows}
    assert found == {
        (0, "scenes_single", "accuracy"), (1, "scenes_multilabel", "map"),
        (1, "scenes_multilabel", "f1"), (2, "scenes_segment", "miou"),
        (3, "scenes_text", "accuracy"), (4, "scenes_single", "accuracy"),
        (5, "scenes_multilabel", "map"), (5, "scenes_multilabel", "f1"),
    }  # fmt: skip
    means = result.summary["tasks"]
    assert list(means) == list(FOUR)
    ours = [row["value"] for row in rows if row["metric"] == "map"]
    assert means["scenes_multilabel"]["map"] == pytest.approx(sum(ours) / 2)
    clients = [r for r in result.clients.to_pylist() if r["round"] == 2 and r["phase"] == "eval"]
    assert [row["model"] for row in clients][:3] == [
        "mlp/scenes_single", "cnn5/scenes_multilabel", "unet_slim/scenes_segment"
    ]  # fmt: skip
    score = {row["client"]: row["value"] for row in rows if row["metric"] != "f1"}
    assert [row["accuracy"] for row in clients] == pytest.approx([score[c] for c in range(6)])
    losses = result.rounds["train_loss"].to_pylist()
    assert losses[1] < losses[0]


def test_the_same_seed_gives_the_same_digest_also_when_resumed(tmp_path: Path) -> None:
    whole = finished(config(tmp_path / "whole"))
    half = config(tmp_path / "half", rounds=1, checkpoint_every=1)
    finished(half)
    again = run(half.replace({"rounds": 2}), console=Silent(), resume=True)  # type: ignore[arg-type]
    assert again.digest == whole.digest
    assert again.tasks.to_pylist() == whole.tasks.to_pylist()


def test_lora_and_the_ordinary_task(tmp_path: Path) -> None:
    fleet = FleetConfig(models=("vit_small", "word_bag"), feature_dim=32, lora=4)
    given = settings(tasks=("scenes_single", "scenes_text"), public=0)
    result = finished(config(tmp_path / "run", clients=2, rounds=1, fleet=fleet, data=given))
    assert set(result.summary["tasks"]) == {"scenes_single", "scenes_text"}


def test_a_method_that_needs_one_label_space_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"fedproto needs one label space.*has 4.*--method .*local"
    ):
        finished(config(tmp_path / "run", "fedproto"))


def test_one_task_of_sentences_is_one_label_space(tmp_path: Path) -> None:
    given = settings(tasks=("scenes_text",), public=0)
    fleet = FleetConfig(models=("word_bag",), feature_dim=16)
    result = finished(config(tmp_path / "run", "fedproto", data=given, fleet=fleet, rounds=1))
    assert "scenes_text" in result.summary["tasks"]


def test_a_model_for_another_task_is_named_with_its_client(tmp_path: Path) -> None:
    fleet = FleetConfig(models=("mlp",))
    with pytest.raises(ConfigError, match="mlp of client 2, of scenes_segment cannot learn"):
        finished(config(tmp_path / "run", fleet=fleet))


def test_all_clients_test_data_are_no_test_for_one_task(tmp_path: Path) -> None:
    from raysim.config import EvalConfig

    with pytest.raises(ConfigError, match="--eval.data global .*one task"):
        finished(config(tmp_path / "run", eval=EvalConfig(data="global")))
