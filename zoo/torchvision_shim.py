"""Import torchvision, also where its compiled operators do not fit the installed torch."""

import importlib
import sys
from types import ModuleType

import torch

MISMATCH = "operator torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """A CUDA build of torchvision beside a CPU build of torch cannot load its operators, and then
    fails to import because it describes two of them, nms and qnms, by name. No model of ours calls
    either, so in that case alone both names are declared, without kernels, and the import repeated.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != MISMATCH:
            raise
    # Submodules that did load would not be bound to the package when it is imported again.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", _SCHEMA)
    return importlib.import_module("torchvision")
