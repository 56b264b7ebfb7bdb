"""Clients that have a part of the global model, as in HeteroFL and FedRolex: the narrower models
themselves, what goes down and up, and the server's mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from raysim.channels import layout
from raysim.errors import ConfigError
from raysim.method import ClientContext, ClientState, PerClient, Reply, ServerContext
from raysim.norms import is_statistic
from raysim.ops import get_weights, set_weights
from raysim.slicing import Part, Start, cut, expected, leading, part, rows, scatter_mean
from raysim.wire import Uncounted, Weights, like
from zoo import SplitModel
from zoo.split import Backbone

Scaler = Literal["always", "training", "off"]


class Download(NamedTuple):
    model: Weights  # the client's part of the global model
    rate: Uncounted[float]


class Upload(NamedTuple):
    model: Weights
    rate: Uncounted[float]
    classes: Uncounted[Tensor]  # those that the client has


@dataclass
class Client(ClientState):
    rate: float  # the share of channels in the last download


@dataclass
class Server:
    weights: Weights  # of the global model
    statistics: dict[str, Weights]  # by group of equal sub-models: what batch norm has measured


def check_rates(rates: Sequence[float], flag: str = "--hp.rates") -> None:
    if not rates or not all(0 < rate <= 1 for rate in rates):
        given = " ".join(f"{rate:g}" for rate in rates) or "nothing"
        raise ConfigError(f"{flag} must be above 0 and at most 1, got {given}. Try {flag} 1 0.5")


# Models


def born(model: SplitModel, rate: float, scaler: Scaler, ctx: ClientContext) -> Client:
    """A client that has the first channels of a model, scaled by the rate of its last download."""
    client = Client(SubModel(model, part(layout(ctx.fleet, ctx.task), rate)), rate)

    def divisor(layer: nn.Module) -> float:
        return client.rate if scaler == "always" or layer.training else 1.0

    if scaler != "off":
        scale(client.model, divisor)
    return client


class SubModel(SplitModel):
    """A model as wide as the weights that it was last given."""

    def __init__(self, model: SplitModel, part: Part) -> None:
        backbone = Backbone(model.stem, model.trunk, model.neck)
        super().__init__(model.name, backbone, model.feature_dim, model.head.out_features)
        self.head = model.head
        shrink(self, part)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        resize(self, state_dict)
        return super().load_state_dict(state_dict, *args, **options)


def shrink(model: SplitModel, part: Part) -> None:
    """Leave a model the weights of a part of it."""
    weights = cut(get_weights(model), part)
    resize(model, weights)
    set_weights(model, weights)


def resize(model: SplitModel, weights: Mapping[str, Tensor]) -> None:
    """Make room for weights of other widths; what is in them is undefined."""
    for path, module in model.named_modules():
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        for name, tensor in own.items():
            given = weights.get(f"{path}.{name}", tensor)
            if given.shape != tensor.shape:
                fresh = torch.empty(given.shape, dtype=tensor.dtype, device=tensor.device)
                learns = isinstance(tensor, nn.Parameter)
                setattr(module, name, nn.Parameter(fresh) if learns else fresh)
        if isinstance(module, nn.Conv2d):
            module.out_channels = module.weight.shape[0]
            if module.groups > 1:
                module.groups = module.out_channels  # depthwise: nothing else is sliced
            module.in_channels = module.weight.shape[1] * module.groups
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.num_features = len(module.weight)
    if isinstance(model.head, nn.Linear):
        model.feature_dim = model.head.in_features


def scale(model: nn.Module, rate: Callable[[nn.Module], float]) -> None:
    """HeteroFL's scaler: divide what every hidden layer gives by `rate(layer)`, before the batch
    norm behind it if there is one. A sub-model's activations are then those of the global model."""

    def hook(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        divisor = rate(layer)
        return output if divisor == 1 else output / divisor

    for path, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and not path.endswith("head"):
            layer.register_forward_hook(hook)


# Classes that a client does not have


def masked(logits: Tensor, present: Tensor) -> Tensor:
    """Logits with 0 for the classes that are not in `present`: HeteroFL's masked cross-entropy."""
    absent = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    absent[present] = False
    return logits.masked_fill(absent, 0.0)


def answered(weights: Weights, part: Part, classes: Tensor) -> tuple[Weights, Part]:
    """An upload without the rows of the head that masking kept from learning."""
    rest = {name: weights[name][classes] for name in ("head.weight", "head.bias")}
    where = {name: (rows(classes.tolist()), *part[name][1:]) for name in rest}
    return weights | rest, part | where


# Rounds


def part_of(
    rate: float, ctx: ServerContext, statistics: bool = True, start: Start = leading
) -> Part:
    """A client's part of the global model, with batch-norm statistics or without."""
    whole = part(layout(ctx.fleet, ctx.task), rate, start)
    return {name: runs for name, runs in whole.items() if statistics or not is_statistic(name)}


def apart(weights: Weights, statistics: bool) -> Weights:
    """What batch norm has measured, or all the rest."""
    return {name: w for name, w in weights.items() if is_statistic(name) == statistics}


def as_seen(server: Server, group: str) -> Weights:
    """The global model with the batch-norm statistics of a group of sub-models: what flows through
    a narrow model is not what flows through a wide one, even where they share all weights."""
    return server.weights | server.statistics.get(group, {})


def deal(server: Server, rates: Mapping[int, float], part: Callable[[float], Part]) -> PerClient:
    """To each client its part; those of one rate get the same message."""
    messages = {
        rate: Download(cut(as_seen(server, f"{rate:g}"), part(rate)), rate)
        for rate in dict.fromkeys(rates.values())
    }
    return PerClient({client: messages[rate] for client, rate in rates.items()})


def expect(part: Part) -> Upload:
    """What the owner of a part sends."""
    return Upload(expected(part), 1.0, like(None, dtype=torch.int64))


def average(
    server: Server,
    replies: Sequence[Reply[Upload]],
    part: Callable[[float], Part],
    shares: Sequence[float],
    masked: bool,
) -> None:
    """Every entry the mean of what was sent for it; `masked`, the rows of the head from those who
    have the class."""
    uploads, groups = [], []
    for reply in replies:
        sent, rate, classes = reply.payload
        where = part(rate)
        uploads.append(answered(sent, where, classes) if masked else (sent, where))
        groups.append(f"{rate:g}")
    take_in(server, uploads, groups, shares)


def take_in(
    server: Server,
    uploads: Sequence[tuple[Weights, Part]],
    groups: Sequence[str],
    shares: Sequence[float],
) -> None:
    """The scatter-mean of all uploads; of batch-norm statistics, of each group's by themselves."""
    for group in dict.fromkeys(groups):
        own = [i for i, other in enumerate(groups) if other == group]
        before = apart(as_seen(server, group), statistics=True)
        few = [shares[i] for i in own]
        server.statistics[group] = scatter_mean(before, [uploads[i] for i in own], few)
    learned = apart(server.weights, statistics=False)
    server.weights |= scatter_mean(learned, uploads, shares)
