"""Data sets, and how they are dealt to clients."""

from raysim.data.dataset import Dataset, check, load, names
from raysim.data.partition import Split, split

__all__ = ["Dataset", "Split", "check", "load", "names", "split"]
