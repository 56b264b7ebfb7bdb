"""One vocabulary: a field here is the command-line flag, the YAML key and the Tune key.

Defaults < `--config` file < command line: a YAML file is flattened to flags that stand before the
user's own, so both go through one parser and one style of error. Below `simulation` only plain
values travel.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raysim.errors import ConfigError, unknown
from raysim.settings import Tree, build, dotted, expand_files, last_value, plain


@dataclass(frozen=True)
class DataConfig:
    """The data and how it is dealt to the clients."""

    name: str = "shapes"
    """Data set: shapes (embedded, procedural), fashion_mnist, cifar10, cifar100, svhn,
    tiny_imagenet, or parquet:PATH."""
    root: Path | None = None
    """Folder that holds the data sets (not needed by shapes). Nothing is downloaded."""
    samples: int = 16000
    """Number of images that shapes draws; with --data.tasks, samples of each task's set."""
    classes: int = 10
    """Number of classes that shapes draws, 2 to 100."""
    image_size: int | None = None
    """Resize images to this many pixels a side; None keeps the set's own size (Fashion-MNIST: 32).
    """
    partition: Literal["iid", "dirichlet", "pathological", "classes"] = "dirichlet"
    """How samples are dealt to clients: iid; dirichlet (FedRE's PRA); pathological (FedRE's PAT);
    classes (FedMRL's)."""
    alpha: float = 0.1
    """Concentration of the Dirichlet partition; smaller is more skewed."""
    classes_per_client: int = 2
    """Classes a client holds, for pathological and classes."""
    low_weight: float = 0.4
    """Lower end of the slot weights U(low, 1 - low) in the classes partition (FedMRL's LowProb)."""
    test: Literal["split", "official"] = "split"
    """Where a client's test data come from: split pools the official parts, deals them and splits
    each client's share; official deals the official test part in the proportions of the client's
    training data."""
    test_fraction: float = 0.25
    """Share of a client's samples held out for its test, with --data.test split."""
    public: int = 0
    """Samples, without their labels, that no client gets and that the server has, for methods that
    need a public set; with --data.test official they are of the training part."""
    public_seed: int = 0
    """Which samples are public: the same for every --seed."""
    augment: Literal["none", "flip", "crop_flip"] = "none"
    """Random augmentation of training batches: flip, or crop with 4 pixels of padding and flip."""
    tasks: tuple[str, ...] = ()
    """Different tasks, dealt to clients cyclically as models are: scenes_single, scenes_multilabel,
    scenes_segment, scenes_text (embedded), coco_multilabel, pets, trec, sst2, or any --data.name.
    --data.name is then only the set of the public samples, and may be scenes or coco_multilabel.
    None: every client has the task of --data.name."""
    text_length: int = 32
    """Tokens that are read of a sentence."""
    tokenizer: str = "hash"
    """How sentences become numbers: hash, or the folder or hub name of a tokenizer of
    transformers."""


@dataclass(frozen=True)
class FleetConfig:
    """Who the clients are."""

    models: tuple[str, ...] = ("cnn",)
    """Models or a family (cnn, resnet, slim_resnet, htfe2/3/4/8/9, htm10), dealt to clients
    cyclically."""
    feature_dim: int | None = None
    """Width of the representation. None: the models' own width if they agree, else 512."""
    mapping: Literal["ap", "mp", "fc"] = "ap"
    """How a model of another width reaches it: average-pool, max-pool or a linear layer."""
    gpus: tuple[str, ...] = ()
    """GPU share by model, such as resnet18=0.25 cnn1=0.1; models not named use --gpus."""
    lora: int = 0
    """Rank of LoRA updates, which then train in place of all weights but the head's; for models
    that are pre-trained, where 16 is usual. 0: all weights train."""


@dataclass(frozen=True)
class TrainConfig:
    """Local training, the same for every client."""

    epochs: int = 1
    """Passes over the client's training data in a round."""
    batch_size: int = 16
    """Samples in a step."""
    lr: float = 0.05
    """Learning rate."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer, born anew in every round."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float | None = None
    """Clip the gradient norm of each module to this."""
    drop_last: bool = True
    """Leave out an epoch's last batch when it is not full (a client smaller than a batch trains on
    all it has)."""
    shuffle: bool = True
    """Draw a new order of samples in every epoch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs forward passes under autocast."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory layout of images and convolutions."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation; it never changes training."""

    every: int = 1
    """Evaluate after every so many rounds, and after the last."""
    clients: str = "all"
    """Who is evaluated: all, cohort (this round's participants), or a number (a sample of that
    size, drawn once)."""
    data: Literal["local", "global"] = "local"
    """local: each client's own test data; global: the union of all clients' test data, for every
    client."""
    per: Literal["client", "architecture"] = "client"
    """architecture evaluates only the first client of each model (FedIN's protocol, with
    --eval.data global)."""
    fresh: bool = True
    """Deliver the server's newest message before evaluating (on a copy); False evaluates what local
    training left."""
    batch_size: int = 128
    """Samples in an evaluation step."""


@dataclass(frozen=True)
class DriverConfig:
    """What the driver actor, which runs the server logic, asks Ray for."""

    cpus: float = 0.0
    """CPUs reserved for the driver; it mostly waits, so 0 leaves all of them to the clients."""
    gpus: float = 0.0
    """GPUs reserved for the driver (server-side training runs there)."""


class Sealed(dict[str, Any]):
    """The hyper-parameters of a Config that was checked elsewhere, in a process that does not run
    the method and need not load it."""


@dataclass(frozen=True)
class Config:
    """Simulate model-heterogeneous federated learning."""

    method: str = "fedre"
    """Method to run: a file of methods/, a path such as my_method.py, or package.module."""
    clients: int = 100
    """Number of simulated clients."""
    participation: float = 0.1
    """Share of clients that take part in a round, in (0, 1]."""
    rounds: int = 50
    """Communication rounds."""
    seed: int = 0
    """Seed of every random draw; same seed, same digest, whatever the backend."""
    out: Path | None = None
    """Folder for results. None: runs/METHOD-DATE-TIME."""
    backend: Literal["ray", "local"] = "ray"
    """ray: client actors on a cluster; local: the same simulation in this process."""
    address: str | None = None
    """Ray cluster to attach to: auto, host:port or ray://host:port. None starts a private one on
    this machine."""
    actors: str = "auto"
    """auto: as many as the cluster fits; clients: one named actor for each client; or a number."""
    cpus: float = 1.0
    """CPUs per client actor (torch gets the whole ones as threads)."""
    gpus: float = 0.0
    """GPUs per client actor; any fraction."""
    memory: float | None = None
    """GiB of memory per client actor that Ray sets aside; None asks for none."""
    dashboard: bool = True
    """Start Ray's dashboard (on loopback) with a private cluster."""
    checkpoint_every: int = 20
    """Save a checkpoint after every so many rounds, at the end and when stopped; 0 saves none."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep."""
    on_client_error: Literal["fail", "retry", "drop"] = "fail"
    """When a client's step fails: end the run, try it 3 times in all first, or go on without that
    client in that round."""
    watchdog: float = 600.0
    """Seconds without progress after which the run ends and says what is pending; 0 waits on."""
    detach: bool = False
    """Leave the run on the cluster of --address and return; follow it with --attach."""
    data: DataConfig = field(default_factory=DataConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)
    hp: Any = None
    """Hyper-parameters of the method."""
    source: str | None = None
    """Text of the user's own method file; filled in by raysim so that every machine has it."""

    def __post_init__(self) -> None:
        if isinstance(self.out, str):  # as a notebook would have it
            object.__setattr__(self, "out", Path(self.out))
        if isinstance(self.hp, Sealed):
            return
        import methods

        if self.source is None:
            object.__setattr__(self, "source", methods.read_source(self.method))
        if self.hp is None or isinstance(self.hp, Mapping):
            hp = build(methods.get(self.method, self.source), self.hp or {}, "hp.")
            object.__setattr__(self, "hp", hp)
        _validate(self)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Config:
        """The command line as a Config. `--help` and errors of spelling end the process, as
        argparse does."""
        import tyro

        import methods

        argv = expand_files(argv)
        spec = last_value(argv, "--method") or cls.method
        hp = methods.get(spec, methods.read_source(spec))
        parsed = tyro.cli(
            _with_hp(hp),
            args=argv,
            prog="python -m raysim.launch",
            description=_DESCRIPTION,
            config=(tyro.conf.FlagConversionOff,),
        )
        return Config(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(Config)})

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """The Config in a YAML file, such as a run's own config.yaml."""
        return cls.parse(["--config", str(path)])

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Config:
        """The inverse of `to_tree`."""
        config: Config = build(cls, tree, "")
        return config

    def to_tree(self, source: bool = True) -> Tree:
        """As nested plain values; `source` keeps the text of a user's own method file."""
        tree: Tree = plain(self) | ({"hp": dict(self.hp)} if isinstance(self.hp, Sealed) else {})
        if not source:
            tree.pop("source")
        return tree

    def replace(self, changes: Mapping[str, Any]) -> Config:
        """A copy with dotted keys changed: `config.replace({"train.lr": 0.1, "clients": 10})`."""
        tree = self.to_tree()
        if "method" in changes:
            tree.update(hp=plain(Config(method=changes["method"]).hp), source=None)
        for key, value in changes.items():
            *groups, leaf = key.replace("-", "_").split(".")
            node: Any = tree
            for group in groups:
                node = node.get(group) if isinstance(node, dict) else None
            if not isinstance(node, dict) or leaf not in node:
                raise unknown("setting", key, dotted(tree), "config")
            node[leaf] = value
        return Config.from_tree(tree)


_DESCRIPTION = """\
Simulate model-heterogeneous federated learning: --clients N of them, each with its own model, on
Ray or in-process.

--config FILE reads any of these settings from a YAML file (such as a run's config.yaml); flags
given here win over it.
--hp.* are the settings of the chosen --method.

--resume OUT goes on with a run from its last checkpoint; --rounds may extend it.
--attach RUN follows a run that was left on a cluster with --detach; --stop RUN ends it, saved.

--quiet prints only the run's folder, at the end; --json prints one event a line.
--tensorboard writes OUT/tensorboard; --mlflow URI keeps the run in an MLflow store."""


def _with_hp(method: type) -> type[Config]:
    """Config with the method's own class as the type of `hp`, and without what is not the user's to
    type."""
    import tyro

    hidden = tyro.conf.Suppress[str | None]
    fields: list[Any] = [
        ("hp", method, field(default_factory=method)),
        ("source", hidden, field(default=None)),
    ]
    typed = dataclasses.make_dataclass("Config", fields, bases=(Config,), frozen=True)
    typed.__doc__ = Config.__doc__
    typed.__module__ = Config.__module__
    return typed


def _validate(config: Config) -> None:
    """Everything that is wrong whatever the data, the fleet or the cluster."""

    def require(holds: bool, flag: str, rule: str, found: object) -> None:
        if not holds:
            raise ConfigError(f"--{flag} must be {rule}, got {found}")

    c = config
    for prefix, group in [
        ("", c),
        *((f"{f.name}.", getattr(c, f.name)) for f in dataclasses.fields(c)),
    ]:
        if dataclasses.is_dataclass(group):
            _check_choices(group, prefix)
    require(c.clients >= 1, "clients", "at least 1", c.clients)
    require(0 < c.participation <= 1, "participation", "in (0, 1]", c.participation)
    require(c.rounds >= 1, "rounds", "at least 1", c.rounds)
    require(c.cpus >= 0, "cpus", "at least 0", c.cpus)
    require(c.gpus >= 0, "gpus", "at least 0", c.gpus)
    require(c.gpus <= 1 or c.gpus % 1 == 0, "gpus", "at most 1 or a whole number", c.gpus)
    require(c.memory is None or c.memory > 0, "memory", "more than 0 GiB", c.memory)
    numbered = c.actors.isdecimal() and int(c.actors) >= 1
    require(
        numbered or c.actors in ("auto", "clients"), "actors", "auto, clients or a number", c.actors
    )
    require(c.checkpoint_every >= 0, "checkpoint-every", "at least 0", c.checkpoint_every)
    require(c.keep_checkpoints >= 1, "keep-checkpoints", "at least 1", c.keep_checkpoints)
    require(c.watchdog >= 0, "watchdog", "at least 0", c.watchdog)
    require(c.train.epochs >= 1, "train.epochs", "at least 1", c.train.epochs)
    require(c.train.batch_size >= 1, "train.batch-size", "at least 1", c.train.batch_size)
    require(c.train.lr > 0, "train.lr", "more than 0", c.train.lr)
    require(c.eval.every >= 1, "eval.every", "at least 1", c.eval.every)
    require(c.eval.batch_size >= 1, "eval.batch-size", "at least 1", c.eval.batch_size)
    if c.data.tasks and c.eval.data == "global":
        raise ConfigError(
            "--eval.data global tests every client on all test data, which needs one task; "
            "with --data.tasks try --eval.data local"
        )
    some = c.eval.clients.isdecimal() and int(c.eval.clients) >= 1
    require(
        some or c.eval.clients in ("all", "cohort"),
        "eval.clients",
        "all, cohort or a number",
        c.eval.clients,
    )


def _check_choices(group: Any, prefix: str) -> None:
    for name, hint in typing.get_type_hints(type(group)).items():
        choices, found = typing.get_args(hint), getattr(group, name, None)
        if typing.get_origin(hint) is Literal and found not in choices:
            raise unknown(
                "choice", str(found), map(str, choices), f"--{prefix}{name.replace('_', '-')}"
            )
