"""`python -m raysim.analyze RUN`: how alike the models of a run's clients are, from the inside.

The clients of the last checkpoint see the same test images, each in the state in which it was left.
Into RUN/analysis go, as figures for a paper and as data,

    cka.parquet   cka.png  .pdf .svg    linear CKA of every two clients, stage by stage
    tsne.parquet  tsne.png .pdf .svg    t-SNE of one class's images as all of them represent it

A stage is a part of a model by its place: `stem`, then `stage1`, `stage2`, ... or, of a trunk that
does not come in stages, `trunk`, then `neck` (the representation) and `head` (the scores).
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import tyro
from torch import Tensor

from raysim.analyze_run import Run, listed, stages
from raysim.cka import alignment, gram
from raysim.errors import ConfigError
from raysim.launch import exit_code
from raysim.record import write_parquet
from raysim.tsne import tsne


@dataclass(frozen=True)
class Options:
    """Compare the models of a run's clients: linear CKA stage by stage, t-SNE of one class."""

    run: tyro.conf.Positional[Path]
    """A run's folder, with a checkpoint in it."""
    clients: tuple[int, ...] = ()
    """Which clients to compare; without, two of each architecture, ten at most, last trained
    first."""
    stages: tuple[str, ...] = ()
    """Which stages to compare, such as stage4 neck; without, all that two clients share."""
    label: int = 0
    """The class whose images t-SNE shows."""
    images: int = 500
    """Test images for CKA."""
    points: int = 50
    """Test images of the class for t-SNE; each is one point a client."""
    stage: str = "neck"
    """The stage that t-SNE shows; it must be of the same size in all clients."""
    unbiased: bool = False
    """Estimate CKA without bias; the papers' is biased upwards when images are few."""
    perplexity: float = 30.0
    """About how many neighbors t-SNE keeps together."""
    seed: int = 0
    """Which test images are drawn."""
    figures: bool = True
    """Draw the figures; --no-figures writes the data alone and needs no matplotlib."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a checkpoint is broken, 2 there is nothing to compare."""
    options = tyro.cli(Options, args=argv, prog="python -m raysim.analyze", description=__doc__)
    return exit_code(lambda: analyze(options))


def analyze(options: Options) -> None:
    """Write RUN/analysis, and say what is in it."""
    _check(options)
    run = Run.open(options.run)
    clients = run.chosen(options.clients)
    rows, of_class = run.draw(options.label, options.images, options.points, options.seed)
    grams: dict[str, dict[int, Tensor]] = {}
    seen: dict[int, Tensor] = {}
    found: dict[str, None] = {}
    for client in clients:
        model = run.model(client)
        names = [name for name, _ in stages(model)]
        found |= dict.fromkeys(names)
        wanted = [name for name in names if not options.stages or name in options.stages]
        shown = run.features(client, model, rows, wanted)
        for name in wanted:
            grams.setdefault(name, {})[client] = gram(shown[name], options.unbiased)
        if options.stage in names:
            seen[client] = run.features(client, model, of_class, [options.stage])[options.stage]
    if unknown := [name for name in (*options.stages, options.stage) if name not in found]:
        raise ConfigError(f"no client has a stage {unknown[0]!r}; there are {', '.join(found)}")
    shared = {name: of for name in found if len(of := grams.get(name, {})) > 1}
    if not shared:
        raise ConfigError(
            f"clients {listed(clients)} share no stage"
            + (f" of {' '.join(options.stages)}" if options.stages else "")
            + f"; they have {', '.join(found)}. Leave --stages out, or name other --clients"
        )
    folder = options.run / "analysis"
    folder.mkdir(exist_ok=True)
    facts = {"round": str(run.checkpoint.round), "images": str(len(rows)), "label": options.label,
             "unbiased": options.unbiased, "seed": options.seed}  # fmt: skip
    matrices = {name: (list(of), alignment(list(of.values()))) for name, of in shared.items()}
    _write(run.cka_table(matrices), folder / "cka.parquet", facts)
    if options.figures:
        from raysim import analyze_figures

        analyze_figures.heat_maps(folder, matrices, run.architecture, options.unbiased)
    for name, (ids, matrix) in matrices.items():
        apart = matrix[~torch.eye(len(ids), dtype=torch.bool)]
        print(f"{name:8} CKA of {len(ids)} clients: mean {apart.mean():.3f}, "
              f"{apart.min():.3f} to {apart.max():.3f}")  # fmt: skip
    sizes = {client: tuple(features.shape[1:]) for client, features in seen.items()}
    if len(set(sizes.values())) == 1 and len(of_class) * len(seen) >= 4:
        places = tsne(torch.cat([f.flatten(1) for f in seen.values()]), options.perplexity)
        parts = places.view(len(seen), -1, 2)
        table = run.tsne_table(list(seen), of_class, parts, options.label)
        _write(table, folder / "tsne.parquet", facts | {"perplexity": options.perplexity})
        if options.figures:
            analyze_figures.scatter(folder, list(seen), parts, run.architecture, options.label)
        print(f"t-SNE of class {options.label}: {len(of_class)} images, {len(seen)} clients")
    else:
        told = ", ".join(f"client {k} {'x'.join(map(str, size))}" for k, size in sizes.items())
        print(f"no t-SNE: {options.stage} differs in size ({told}); name --clients of one size")
    print(f"wrote {folder}")


def _check(options: Options) -> None:
    if options.figures and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "figures need matplotlib, which is not installed. Type pip install 'raysim[plots]', or "
            "add --no-figures for the data alone"
        )
    for flag, value, least in (("images", options.images, 4), ("points", options.points, 1)):
        if value < least:
            raise ConfigError(f"--{flag} must be {least} or more, got {value}")
    if not options.perplexity >= 1:
        raise ConfigError(f"--perplexity must be 1 or more, got {options.perplexity}")


def _write(table: pa.Table, path: Path, facts: dict[str, Any]) -> None:
    write_parquet(table.replace_schema_metadata({k: str(v) for k, v in facts.items()}), path)


if __name__ == "__main__":
    sys.exit(main())
