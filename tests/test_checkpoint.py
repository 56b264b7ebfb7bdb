"""Checkpoints: whole or not there, small, pruned, verified, and never code."""

import builtins
import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from test_contract import simulate

import methods
from raysim import checkpoint, wire
from raysim.checkpoint import Checkpoint, Store
from raysim.errors import CheckpointError, StatesLost
from raysim.wire import Packed


def packed(*values: float) -> Packed:
    return wire.pack({"w": torch.tensor(values), "name": "x"})


def save(store: Store, round: int, changed: dict[int, Packed], server: float = 0.0) -> None:
    fetches = [(client, lambda state=state: state) for client, state in changed.items()]
    store.save(round, packed(server), fetches, {"round": round}, wait=True)


def whole(store: Store) -> list[tuple[int, dict[int, list[float]]]]:
    """The round and the client states of each checkpoint that is whole, the newest first."""
    found = []
    for each in store.newest_first():
        if isinstance(each, CheckpointError):
            continue
        try:
            each.server()
            states = {client: wire.unpack(state)["w"].tolist() for client, state in each.clients()}
        except CheckpointError:
            continue
        found.append((each.round, states))
    return found


def files(out: Path) -> set[str]:
    folder = out / "checkpoints"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def two(tmp_path: Path) -> Store:
    """Checkpoints after rounds 2 and 4; client 0 changed only before the first."""
    store = Store(tmp_path, keep=2)
    save(store, 2, {0: packed(1, 2), 1: packed(3, 4)})
    save(store, 4, {1: packed(5, 6)})
    return store


# What is written


def test_a_checkpoint_gives_back_what_was_saved(two: Store) -> None:
    assert whole(two) == [(4, {0: [1, 2], 1: [5, 6]}), (2, {0: [1, 2], 1: [3, 4]})]


def test_only_clients_that_changed_are_written(tmp_path: Path) -> None:
    """The cost of a checkpoint is that of two clients, however many there are."""
    costs = []
    for clients in (10, 200):
        out = tmp_path / str(clients)
        store = Store(out, keep=9)
        save(store, 1, {client: packed(*range(1000)) for client in range(clients)})
        before = files(out)
        save(store, 2, {3: packed(*range(1000)), 7: packed(*range(1000))})
        fresh = files(out) - before
        names = {"000002.json", "000002.server"}
        assert fresh == names | {f"clients/00000{client}-000002.state" for client in (3, 7)}
        states = [name for name in fresh if name.endswith((".state", ".server"))]
        costs.append(sum((out / "checkpoints" / name).stat().st_size for name in states))
    assert costs[0] == costs[1]


def test_a_run_writes_only_the_clients_of_the_rounds_since(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = simulate("local", out, clients=20, participation=0.1, rounds=4, checkpoint_every=1,
                      keep_checkpoints=9)  # fmt: skip
    rows = [row for row in result.clients.to_pylist() if row["phase"] == "train"]
    expected = {f"clients/{row['client']:06d}-{row['round']:06d}.state" for row in rows}
    assert {name for name in files(out) if name.startswith("clients/")} == expected


def test_pruning_keeps_the_newest_and_all_they_refer_to(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    save(store, 1, {0: packed(0), 1: packed(0)})
    for round in (2, 3, 4):
        save(store, round, {1: packed(round)})
    assert whole(store) == [(4, {0: [0], 1: [4]}), (3, {0: [0], 1: [3]})]
    states = {"clients/000000-000001.state", "clients/000001-000003.state"}
    assert files(tmp_path) == states | {
        *("000003.json", "000003.server", "000004.json", "000004.server"),
        "clients/000001-000004.state",
    }


def test_pruning_to_one_keeps_one(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    for round in (1, 2, 3):
        save(store, round, {0: packed(round)})
    assert whole(store) == [(3, {0: [3]})]
    assert files(tmp_path) == {"000003.json", "000003.server", "clients/000000-000003.state"}


def test_what_a_checkpoint_saves_does_not_change_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on meanwhile; the counts of its next round are no part of this one. The disk
    is so slow here that a whole round is trained before the manifest is written."""
    config = simulate("local", tmp_path / "undisturbed", rounds=4).config
    config = config.replace({"out": str(tmp_path / "run"), "checkpoint_every": 2})
    flush = checkpoint._flush
    done: list[int] = []
    saves: list[Path] = []

    def slowly(folder: Path) -> None:
        if not saves:
            saves.append(folder)
            faults.eventually(lambda: 3 in done, 5)
            # The counters move right before this event is told.
        flush(folder)

    monkeypatch.setattr(checkpoint, "_flush", slowly)
    faults.die_after(config, 3, lambda event: done.append(getattr(event, "round", 0)))
    monkeypatch.undo()
    assert [round for round, _ in _manifests(tmp_path / "run")] == [2]
    again = faults.resume(tmp_path / "run")
    assert again.summary["selected"] == {"done": 12, "dropped": 0, "failed": 0}


def _manifests(out: Path) -> list[tuple[int, dict[str, Any]]]:
    found = [c for c in Store(out, 9).newest_first() if isinstance(c, Checkpoint)]
    return [(each.round, each.extra) for each in found]


# Killed while writing


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


def _crashes(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Let the call that touches the disk for the `at`-th time die before, or halfway through, what
    it does. Returns the calls that were made."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls and calls[-1] == "dead":
                raise Killed
            calls.append(name)
            if len(calls) == at:
                calls.append("dead")
                if half:
                    real(bytes(args[0])[: len(bytes(args[0])) // 2])
                raise Killed
            return real(*args, **kwargs)

        return call

    real_open = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = real_open(file, mode, *args, **kwargs)
        if "w" not in mode or "checkpoints" not in str(file):
            return stream
        if calls and calls[-1] == "dead":
            stream.close()
            raise Killed
        calls.append(f"open {Path(file).name}")
        if len(calls) == at:
            calls.append("dead")
            stream.close()
            raise Killed
        raw = stream.write
        as_bytes = (lambda data: raw(data)) if "b" in mode else (lambda data: raw(data.decode()))

        class Torn:
            def __enter__(self) -> "Torn":
                return self

            def __exit__(self, *args: object) -> None:
                stream.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

            def write(self, data: Any) -> int:
                data = data.encode() if isinstance(data, str) else bytes(data)
                return counted("write", as_bytes, half=True)(data)

        return Torn()

    monkeypatch.setattr(builtins, "open", opened)
    for module, name in [(os, "replace"), (os, "fsync"), (checkpoint, "_flush")]:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    monkeypatch.setattr(Path, "unlink", counted("unlink", Path.unlink))
    return calls


def _dies_at_every_stage(tmp_path: Path, prepare: Callable[[Store], None], round: int) -> list[int]:
    """Save `round` over what `prepare` saved, dying at each stage in turn; returns the newest round
    that was whole after each death. Every checkpoint that is whole holds what was saved."""
    newest = []
    for at in range(1, 100):
        out = tmp_path / str(at)
        store = Store(out, keep=2)
        prepare(store)
        with pytest.MonkeyPatch.context() as patch:
            calls = _crashes(patch, at)
            store.save(round, packed(9), [(1, lambda: packed(9))], {}, wait=False)
            if store._thread is not None:
                store._thread.join()
        found = whole(Store(out, keep=2))
        assert found, f"killed at {calls}: no checkpoint is whole any more"
        newest.append(found[0][0])
        expected = {4: {0: [1.0, 2.0], 1: [5.0, 6.0]}, round: {0: [1.0, 2.0], 1: [9.0]}}
        assert found[0][1] in (expected[found[0][0]], expected[round])
        if "dead" not in calls:
            return newest
    raise AssertionError("it touches the disk more often than this test thought")


def _two(store: Store) -> None:
    save(store, 2, {0: packed(1, 2), 1: packed(3, 4)})
    save(store, 4, {1: packed(5, 6)})


def test_killed_at_any_stage_of_writing_the_one_before_is_the_newest(tmp_path: Path) -> None:
    newest = _dies_at_every_stage(tmp_path, _two, 6)
    assert newest == sorted(newest)
    assert newest[0] == 4
    assert newest[-1] == 6
    assert len(newest) > 10


def test_killed_while_a_round_is_saved_again_it_stays_the_newest(tmp_path: Path) -> None:
    """A run saves its last round twice if --checkpoint-every divides it; and with only one
    checkpoint kept there is none to fall back to."""
    for at in range(1, 100):
        out = tmp_path / str(at)
        store = Store(out, keep=1)
        _two(store)
        with pytest.MonkeyPatch.context() as patch:
            calls = _crashes(patch, at)
            store.save(4, packed(0.0), [], {"round": 4}, wait=False)
            if store._thread is not None:
                store._thread.join()
        assert whole(Store(out, keep=1)) == [(4, {0: [1, 2], 1: [5, 6]})], f"killed at {calls}"
        if "dead" not in calls:
            return


def test_a_disk_that_is_full_leaves_the_one_before(
    two: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint.*No space left"):
        save(two, 6, {0: packed(7)})
    monkeypatch.undo()
    assert whole(two)[0][0] == 4
    save(two, 6, {0: packed(7)})
    assert whole(two)[0] == (6, {0: [7], 1: [5, 6]})


def test_a_state_that_is_lost_while_it_is_saved_leaves_the_one_before(two: Store) -> None:
    def gone() -> Packed:
        raise StatesLost("the state of client 0 was lost")

    with pytest.raises(StatesLost):
        two.save(6, packed(0), [(0, gone)], {}, wait=True)
    assert whole(two)[0] == (4, {0: [1, 2], 1: [5, 6]})


def test_a_checkpoint_under_way_is_waited_for(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    store.save(1, packed(0), [(0, lambda: packed(1))], {}, wait=False)
    store.save(2, packed(0), [(0, lambda: packed(2))], {}, wait=False)
    store.finish()
    assert whole(store) == [(2, {0: [2]}), (1, {0: [1]})]


# Damage


PARTS = ["000004.json", "000004.server", "clients/000001-000004.state"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "damage",
    [_truncate, _halve, _empty, Path.unlink, _replace_by_a_folder],
    ids=lambda f: f.__name__,
)
def test_a_torn_or_missing_part_is_found_and_the_one_before_is_whole(
    damage: Callable[[Path], None], part: str, two: Store
) -> None:
    damage(two.folder / part)
    assert whole(two) == [(2, {0: [1, 2], 1: [3, 4]})]


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_found_wherever_it_is(part: str, two: Store) -> None:
    path = two.folder / part
    content = path.read_bytes()
    missed = []
    for byte in range(len(content)):
        for bit in (0, 3, 5, 6, 7):
            flipped = bytearray(content)
            flipped[byte] ^= 1 << bit
            path.write_bytes(flipped)
            if [round for round, _ in whole(two)] != [2]:
                missed.append((byte, bit))
    assert missed == []


def test_a_part_both_refer_to_breaks_both(two: Store) -> None:
    _truncate(two.folder / "clients/000000-000002.state")
    assert whole(two) == []


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"sha256": 1}', b"[" * 100_000),
        *(b'{"sha256": "", "content": 3}', b'{"sha256": "", "content": null}'),
        pickle.dumps({"content": "", "sha256": ""}),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_manifest_that_is_none_is_an_error_not_a_crash(content: bytes, two: Store) -> None:
    (two.folder / "000004.json").write_bytes(content)
    newest = next(two.newest_first())
    assert isinstance(newest, CheckpointError)
    assert "000004.json" in str(newest)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def test_loading_runs_no_code(two: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that holds a pickle is refused, even when its checksum is right."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bomb = pickle.dumps(Bomb())
    path = two.folder / "000004.server"
    head = path.read_bytes()[: len(checkpoint._MAGIC)]
    for content in (bomb, head + len(bomb).to_bytes(8, "big") + bomb):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            next(two.newest_first()).server()
    (two.folder / "000004.json").write_bytes(bomb)
    assert isinstance(next(two.newest_first()), CheckpointError)
    with pytest.raises(ValueError, match="JSON|Expecting|codec"):
        wire.unpack(Packed(bomb, packed(0).buffer))
    assert not (tmp_path / "exploded").exists()


def test_no_module_of_ours_can_load_a_pickle() -> None:
    root = Path(checkpoint.__file__).parent
    for path in [*root.rglob("*.py"), *(root.parent / "methods").glob("*.py")]:
        text = path.read_text()
        for word in ("import pickle", "torch.load", "allow_pickle=True", "yaml.load("):
            assert word not in text, (path, word)


# What later ones build on


def test_going_back_makes_later_checkpoints_void(two: Store, tmp_path: Path) -> None:
    _, before = two.newest_first()
    assert isinstance(before, Checkpoint)
    again = Store(tmp_path, keep=2)
    again.continue_from(before)
    assert [round for round, _ in whole(again)] == [2]
    save(again, 3, {0: packed(8)})
    assert whole(again) == [(3, {0: [8], 1: [3, 4]}), (2, {0: [1, 2], 1: [3, 4]})]


def test_rounds_beyond_six_digits_are_still_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for round in (999_998, 999_999, 1_000_000, 1_000_001):
        save(store, round, {0: packed(round % 10)})
    assert [round for round, _ in whole(store)] == [1_000_001, 1_000_000]


def test_a_new_run_never_takes_up_checkpoints_of_another(tmp_path: Path) -> None:
    """Someone removed the tables of a run but not its checkpoints."""
    out = tmp_path / "run"
    simulate("local", out, rounds=4, seed=5, checkpoint_every=1)
    for path in out.iterdir():
        if path.is_file():
            path.unlink()
    expected = simulate("local", tmp_path / "expected", rounds=3).digest
    from raysim.errors import RunError

    try:
        simulate("local", out, rounds=2, checkpoint_every=1)
    except RunError:
        return  # refused, like any other folder that is not empty of a run
    assert faults.resume(out, rounds=3).digest == expected


# Every method


@pytest.mark.parametrize("method", methods.names())
def test_the_state_of_every_method_comes_back_bit_for_bit(method: str, tmp_path: Path) -> None:
    """Server and clients of the last checkpoint are those the digest was taken of."""
    from raysim.record import Recorder
    from raysim.summary import digest

    result = simulate(method, tmp_path / "run", rounds=2, checkpoint_every=1)
    last = next(Store(result.out, 2).newest_first())
    assert isinstance(last, Checkpoint)
    assert last.round == 2
    rows, recorder = result.rounds.to_pylist(), Recorder(result.out)
    recorder.variants.reset(result.variants)
    variants = recorder.variant_history()
    assert digest(last.server(), last.clients(), rows, variants) == result.digest
    assert json.loads(last.server().header)  # text, not code
