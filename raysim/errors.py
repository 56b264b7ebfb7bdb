"""Everything raysim raises on purpose.

    RaysimError
    ├── ConfigError      what the user typed cannot be: a name, a value, a combination
    ├── DataError        a data set is missing, unreadable or too small
    ├── ClusterError     the plan does not fit the cluster, or the cluster cannot be reached
    ├── WireError        a message holds what may not cross the network
    ├── ClientError      a client's step failed; carries the original traceback
    ├── CheckpointError  a checkpoint is torn, corrupt or cannot be written
    ├── WriteError       a table of the run cannot be written: the disk is full, say
    ├── StatesLost       a node took client states with it; the run goes back to a checkpoint
    ├── Stalled          nothing happened for longer than --watchdog; says what is pending
    ├── Stopped          the run was asked to stop, and saved a checkpoint
    └── RunError         a run folder is not one, or already holds one

`launch` prints the first three, and RunError, as one message without a traceback and exits with
code 2. The others are the method's fault, not the command line's: they exit with code 1 and show
the original traceback first.
"""

import difflib
from collections.abc import Iterable


class RaysimError(Exception):
    """The root: catch this to catch everything raysim raises on purpose."""

    exit_code = 1


class ConfigError(RaysimError):
    exit_code = 2


class DataError(RaysimError):
    exit_code = 2


class ClusterError(RaysimError):
    exit_code = 2


class RunError(RaysimError):
    exit_code = 2


class WireError(RaysimError):
    pass


class CheckpointError(RaysimError):
    pass


class WriteError(RaysimError):
    pass


class StatesLost(RaysimError):
    pass


class Stalled(RaysimError):
    """`cause` holds the stacks of the processes that do not answer."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message, cause)
        self.message = message
        self.cause = cause

    def __str__(self) -> str:
        return self.message


class Stopped(RaysimError):
    exit_code = 130


class ClientError(RaysimError):
    """A client's step failed. `cause` is the original traceback as text, since it crossed
    processes."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message, cause)
        self.message = message
        self.cause = cause

    def __str__(self) -> str:
        return self.message


def unknown(kind: str, name: str, known: Iterable[str], flag: str) -> ConfigError:
    """`unknown model 'resnet9' in fleet.models; did you mean 'resnet18'?`, with all names when none
    is near."""
    names = sorted(known)
    lowered = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"did you mean {lowered[near[0]]!r}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"unknown {kind} {name!r} in {flag}; {hint}")
