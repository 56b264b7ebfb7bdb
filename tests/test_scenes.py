"""The embedded scenes: their answers agree with each other, and with what is to be seen."""

import numpy as np
import pytest

from raysim.data import scenes

WORDS = {word: kind for kind, names in enumerate(scenes.NAMES) for word in names}


@pytest.fixture(scope="module")
def drawn() -> dict[str, np.ndarray]:
    return scenes.draw(600)


def test_a_scene_is_the_same_however_many_are_drawn(drawn: dict[str, np.ndarray]) -> None:
    few = scenes.draw(7)
    assert all((few[name] == drawn[name][:7]).all() for name in few)


def test_other_streams_are_other_scenes(drawn: dict[str, np.ndarray]) -> None:
    assert (scenes.draw(50, stream=1)["images"] != drawn["images"][:50]).mean() > 0.5


def test_the_mask_shows_what_is_seen(drawn: dict[str, np.ndarray]) -> None:
    for mask, seen in zip(drawn["masks"], drawn["seen"], strict=True):
        counts = np.bincount(mask.ravel(), minlength=scenes.CLASSES + 1)
        assert ((counts[1:] >= scenes.SEEN) == seen).all()
        assert counts[0] > 0


def test_what_is_in_front_is_seen_and_all_kinds_occur(drawn: dict[str, np.ndarray]) -> None:
    assert drawn["seen"][np.arange(600), drawn["front"]].all()
    assert np.bincount(drawn["front"], minlength=scenes.CLASSES).min() > 40
    assert set(drawn["seen"].sum(axis=1)) == {1, 2, 3}


def test_pixels_have_the_color_of_the_caption(drawn: dict[str, np.ndarray]) -> None:
    """Of every scene with one shape: the color inside the mask is nearest to the caption's."""
    palette = np.array(list(scenes.COLORS.values()))
    for image, mask, caption in zip(
        drawn["images"], drawn["masks"], drawn["captions"], strict=True
    ):
        _, color, *rest = caption.split()
        if len(rest) == 1:
            mean = image[:, mask > 0].mean(axis=1) / 255
            nearest = np.abs(palette - mean).sum(axis=1).argmin()
            assert list(scenes.COLORS)[nearest] == color


def test_the_caption_says_who_is_in_front(drawn: dict[str, np.ndarray]) -> None:
    for caption, front, seen in zip(drawn["captions"], drawn["front"], drawn["seen"], strict=True):
        kinds = [WORDS[word] for word in caption.split() if word in WORDS]
        assert kinds[-1 if "behind" in caption else 0] == front
        assert set(np.flatnonzero(seen)) <= set(kinds)


def test_images_of_another_size() -> None:
    large = scenes.draw(3, size=48)
    assert large["images"].shape == (3, 3, 48, 48)
    assert large["masks"].shape == (3, 48, 48)
