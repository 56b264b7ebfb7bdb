"""Save, verify, resume. A checkpoint is the whole run after a round; loading one runs no code.

    OUT/checkpoints/
      000020.json                  manifest: the round, what it is made of, a checksum of each part
      000020.server                the server's state
      clients/000007-000020.state  client 7 as checkpoint 20 found it; later ones refer to it as
                                   long as the client does not change

Only clients that changed are written. All files are on disk before the manifest gets its name, so
a manifest that is there means a checkpoint that was whole; one that no longer is (a torn or flipped
file) fails its checksum and the one before it is used.
"""

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysim.errors import CheckpointError, StatesLost
from raysim.wire import Packed

FOLDER = "checkpoints"
_MAGIC = b"raysim checkpoint 1\n"

Fetch = Callable[[], Packed]


@dataclass(frozen=True)
class Checkpoint:
    """A saved run whose manifest is whole. Its parts are verified as they are read."""

    folder: Path
    round: int
    extra: dict[str, Any]
    parts: dict[str, list[str]]
    """Part name ("server" or a client's id) -> file and SHA-256."""

    def server(self) -> Packed:
        return self._read("server")

    def clients(self) -> Iterator[tuple[int, Packed]]:
        for client in sorted(int(name) for name in self.parts if name != "server"):
            yield client, self._read(str(client))

    def _read(self, name: str) -> Packed:
        file, digest = self.parts[name]
        return read_part(self.folder / file, digest)


class Store:
    """The checkpoints of one run."""

    def __init__(self, out: Path, keep: int) -> None:
        self.folder = out / FOLDER
        self.keep = keep
        self.parts: dict[str, list[str]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        round: int,
        server: Packed,
        changed: Sequence[tuple[int, Fetch]],
        extra: dict[str, Any],
        wait: bool,
    ) -> None:
        """Write a checkpoint; without `wait` the run goes on meanwhile, as states never change."""
        self.finish()
        work = threading.Thread(target=self._save, args=(round, server, changed, extra))
        self._thread = work
        work.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for a checkpoint under way; what went wrong there is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, StatesLost):
                raise error
            raise CheckpointError(f"cannot write a checkpoint to {self.folder}: {error}") from error

    def _save(
        self,
        round: int,
        server: Packed,
        changed: Sequence[tuple[int, Fetch]],
        extra: dict[str, Any],
    ) -> None:
        try:
            (self.folder / "clients").mkdir(parents=True, exist_ok=True)
            parts = dict(self.parts)
            parts["server"] = self._write(f"{round:06d}.server", server)
            for client, fetch in changed:
                parts[str(client)] = self._write(f"clients/{client:06d}-{round:06d}.state", fetch())
            _flush(self.folder)
            self._write_manifest(round, {"round": round, "extra": extra, "parts": parts})
            self.parts = parts
            self._prune()
        except BaseException as error:  # it is raised again by `finish`, in the run's own thread
            self._error = error

    def _write(self, file: str, packed: Packed) -> list[str]:
        head = _MAGIC + len(packed.header).to_bytes(8, "big") + packed.header
        aside = self.folder / f"{file}.aside"  # a checkpoint of this round may be there already
        with open(aside, "wb") as stream:
            stream.write(head)
            stream.write(packed.buffer.data)
        os.replace(aside, self.folder / file)
        return [file, _digest(head, packed.buffer)]

    def _write_manifest(self, round: int, content: dict[str, Any]) -> None:
        text = json.dumps(content)
        whole = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})
        aside = self.folder / f".{round:06d}.json"
        with open(aside, "w") as stream:
            stream.write(whole)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, self.folder / f"{round:06d}.json")
        _flush(self.folder)

    def _prune(self) -> None:
        """Keep the newest checkpoints and the files they refer to."""
        manifests = self._manifests()
        for old in manifests[: -self.keep]:
            old.unlink()
        needed = set()
        for manifest in manifests[-self.keep :]:
            checkpoint = _open(manifest)
            if isinstance(checkpoint, Checkpoint):
                needed |= {file for file, _ in checkpoint.parts.values()}
        for path in [*self.folder.glob("*.server*"), *(self.folder / "clients").glob("*.state*")]:
            if str(path.relative_to(self.folder)) not in needed:
                path.unlink()

    def newest_first(self) -> Iterator[Checkpoint | CheckpointError]:
        """Every checkpoint from the newest on; one whose manifest is broken comes as the error."""
        for manifest in reversed(self._manifests()):
            yield _open(manifest)

    def _manifests(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.json"), key=lambda path: int(path.stem))

    def continue_from(self, checkpoint: Checkpoint | None) -> None:
        """What this run restored is what its next checkpoint adds to. Later ones are void."""
        self.parts = dict(checkpoint.parts) if checkpoint else {}
        last = checkpoint.round if checkpoint else 0
        for manifest in self._manifests():
            if int(manifest.stem) > last:
                manifest.unlink()


def _open(manifest: Path) -> Checkpoint | CheckpointError:
    try:
        whole = json.loads(manifest.read_text())
        text = whole["content"]
        if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
            return CheckpointError(f"{manifest} is corrupt: its checksum does not match")
        content = json.loads(text)
        return Checkpoint(manifest.parent, content["round"], content["extra"], content["parts"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return CheckpointError(f"{manifest} is torn or unreadable ({type(error).__name__})")


def read_part(path: Path, digest: str) -> Packed:
    """One file of a checkpoint, verified."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} is missing or unreadable ({error.strerror})") from error
    start = len(_MAGIC) + 8
    head = content[:start].tobytes()
    size = int.from_bytes(head[len(_MAGIC) :], "big")
    if not head.startswith(_MAGIC) or len(head) < start or start + size > len(content):
        raise CheckpointError(f"{path} is torn: it is not a whole checkpoint file")
    if _digest(content[: start + size].tobytes(), content[start + size :]) != digest:
        raise CheckpointError(f"{path} is corrupt: its checksum does not match")
    return Packed(content[start : start + size].tobytes(), content[start + size :])


def _digest(head: bytes, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """SHA-256 over the whole file: where the header ends is part of it."""
    sha = hashlib.sha256(head)
    sha.update(buffer.data)
    return sha.hexdigest()


def _flush(folder: Path) -> None:
    """Everything written to this file system so far is on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs"):
            os.sync()
        elif libc.syncfs(handle):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(handle)
