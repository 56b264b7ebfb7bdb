"""Small operations that many methods share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.config import TrainConfig
from raysim.sgd import SGD
from raysim.wire import Weights

Loss = Callable[..., Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]
Optimizer = SGD | torch.optim.Optimizer


def get_weights(module: nn.Module) -> Weights:
    """Parameters and buffers by name. The tensors are the module's own; the wire copies what is
    sent."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def set_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module, in place; names and shapes must match exactly, unless the module
    itself knows better."""
    own = module.state_dict()
    if own.keys() != weights.keys() or any(own[k].shape != weights[k].shape for k in own):
        module.load_state_dict(weights)  # raises, and says what differs; a SubModel takes them
        return
    for name, tensor in own.items():  # load_state_dict does the same, ten times slower
        tensor.copy_(weights[name])


def weighted_mean(weights: Sequence[Weights], shares: Sequence[float]) -> Weights:
    """Mean by name, each name over those who have it: of one architecture or of nested ones
    (FedIN's Eq. 19 when all shares are equal). Integers, such as batch-norm counters, are taken
    from the first owner."""
    result: Weights = {}
    for name in dict.fromkeys(name for one in weights for name in one):
        owners = [
            (one[name], share) for one, share in zip(weights, shares, strict=True) if name in one
        ]
        first = owners[0][0]
        if not first.is_floating_point():
            result[name] = first.clone()
            continue
        total = sum(share for _, share in owners)
        mean = torch.zeros_like(first)
        for tensor, share in owners:
            mean.add_(tensor, alpha=share / total)
        result[name] = mean
    return result


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients for a block; each module's own mode returns afterwards."""
    training = [child for module in modules for child in module.modules() if child.training]
    if training:  # to say so again would take as long as a small forward pass
        for module in modules:
            module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True


def class_means(features: Callable[[Tensor], Tensor], batches: Batches) -> tuple[Tensor, Tensor]:
    """Mean representation of each class that occurs: (classes present, width), and those classes in
    ascending order. Costs O(n d): each sample is added to its class once."""
    sums = counts = None
    for x, y in batches:
        r = features(x).float()
        if sums is None or counts is None:
            sums = r.new_zeros(0, r.shape[1])
            counts = r.new_zeros(0)
        if (need := int(y.max()) + 1) > len(sums):
            sums = torch.cat([sums, sums.new_zeros(need - len(sums), sums.shape[1])])
            counts = torch.cat([counts, counts.new_zeros(need - len(counts))])
        sums.index_add_(0, y, r)
        counts.index_add_(0, y, torch.ones_like(y, dtype=counts.dtype))
    if sums is None or counts is None:
        raise ValueError("class_means needs at least one batch")
    classes = counts.nonzero().squeeze(1)
    return sums[classes] / counts[classes].unsqueeze(1), classes


def kl(teacher: Tensor, student: Tensor, *, htfllib: bool = False) -> Tensor:
    """KL(softmax teacher || softmax student) of two models' logits, the mean of a sample; the
    teacher does not learn from it. `htfllib` is what HtFLlib computes: also divided by the number
    of classes, and the teacher learns too."""
    target = (teacher if htfllib else teacher.detach()).log_softmax(dim=1)
    found = student.log_softmax(dim=1)
    distance = F.kl_div(found, target, reduction="batchmean", log_target=True)
    return distance / teacher.shape[1] if htfllib else distance


def autocast(precision: str, device: str) -> AbstractContextManager[Any]:
    """A context, good for many uses, in which forward passes run at `precision`."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def make_optimizer(
    modules: Sequence[nn.Module], train: TrainConfig, lr: float | None = None
) -> Optimizer:
    """The configured optimizer over everything trainable in the modules."""
    trainable = [p for module in modules for p in module.parameters() if p.requires_grad]
    lr = train.lr if lr is None else lr
    if train.optimizer == "adam":
        return torch.optim.Adam(trainable, lr=lr, weight_decay=train.weight_decay)
    return SGD(trainable, lr, train.momentum, train.weight_decay)


def train(
    loss: Loss,
    modules: Sequence[nn.Module],
    batches: Callable[[], Batches],
    config: TrainConfig,
    device: str,
    lr: float | Sequence[float] | None = None,
    clip: float | None = None,
    adjust: Callable[[], None] | None = None,
) -> float:
    """The training loop of a client: `config.epochs` passes over `batches()`, at one `lr` or at one
    for each module. `clip` holds if `config` has none. `adjust` may change the gradients between
    the backward pass and what uses them. Returns the mean loss of a sample."""
    if isinstance(lr, Sequence):
        each = zip(modules, lr, strict=True)
        optimizers = [make_optimizer([module], config, rate) for module, rate in each]
    else:
        optimizers = [make_optimizer(modules, config, lr)]
    clip = clip if config.clip is None else config.clip
    forward = autocast(config.precision, device)
    total, count = torch.zeros((), device=device), 0
    for _ in range(config.epochs):
        for x, y in batches():
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            with forward, single_sample(modules, len(x)):
                value = loss(x, y)
            value.backward()  # type: ignore[no-untyped-call]
            if adjust is not None:
                adjust()
            if clip is not None:
                for module in modules:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
            total += value.detach() * len(x)
            count += len(x)
        if not bool(total.isfinite()):
            raise FloatingPointError(
                "the training loss is not finite; try a smaller --train.lr or set --train.clip"
            )
    return float(total) / max(count, 1)


@contextmanager
def single_sample(modules: Sequence[nn.Module], size: int) -> Iterator[None]:
    """One sample has no batch statistics: for a batch of one, batch norm uses (and keeps) its
    running ones."""
    norms = [
        child
        for module in (modules if size == 1 else ())
        for child in module.modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def fit(
    loss: Loss,
    *modules: nn.Module,
    data: tuple[Tensor, ...],
    lr: float,
    epochs: int = 1,
    batch_size: int = 32,
    optimizer: Callable[..., Optimizer] = SGD,
    **settings: Any,
) -> float:
    """Train modules on tensors that fit in memory: the server's counterpart of `ctx.fit`. Returns
    the mean loss of a step in the last epoch."""
    step = optimizer([p for module in modules for p in module.parameters()], lr=lr, **settings)
    mean = 0.0
    for _ in range(epochs):
        values = []
        for rows in torch.split(torch.randperm(len(data[0])), batch_size):
            step.zero_grad()
            value = loss(*(tensor[rows] for tensor in data))
            value.backward()  # type: ignore[no-untyped-call]
            step.step()
            values.append(value.detach())
        mean = float(torch.stack(values).mean())
    return mean
