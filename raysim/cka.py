"""Linear centered kernel alignment: how alike two models see the same images.

Kornblith et al., ICML 2019. https://arxiv.org/abs/1905.00414 For representations X and Y of n
images, with centered Gram matrices K = X X^T and L = Y Y^T,

    CKA(X, Y) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))

is 1 for representations that are equal but for rotation, shift and one scale, and 0 for
uncorrelated ones; widths may differ. HSIC is <K, L>, as in that paper and in most that followed.
This is biased: with fewer images than features even unrelated ones are far above 0. The unbiased
estimate of HSIC (Song et al. 2012; used so by Nguyen et al., https://arxiv.org/abs/2010.15327) is
near 0 for them at any n, and may be a little below.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def gram(features: Tensor, unbiased: bool = False) -> Tensor:
    """What `alignment` needs of a representation, one row an image: n x n, in double precision."""
    x = features.flatten(1).double()
    x = x - x.mean(dim=0)  # U-centering does not need this; but large means would cost digits
    k = x @ x.t()
    if not unbiased:
        return k
    n = len(k)
    if n < 4:
        raise ValueError(f"the unbiased estimate needs 4 images or more, got {n}")
    # U-centering (Szekely & Rizzo 2014): <K', L'> / (n (n - 3)) is the unbiased estimate.
    k.fill_diagonal_(0)
    rows = k.sum(dim=1) / (n - 2)
    k = k - rows[:, None] - rows[None, :] + k.sum() / ((n - 1) * (n - 2))
    return k.fill_diagonal_(0)


def alignment(grams: Sequence[Tensor]) -> Tensor:
    """CKA of every pair; NaN with a representation that is the same for all images."""
    flat = torch.stack([k.flatten() for k in grams])
    products = flat @ flat.t()
    norms = products.diagonal().clamp(min=0).sqrt()
    return products / (norms[:, None] * norms[None, :])


def cka(x: Tensor, y: Tensor, unbiased: bool = False) -> float:
    """Of two representations of the same images."""
    return float(alignment([gram(x, unbiased), gram(y, unbiased)])[0, 1])
