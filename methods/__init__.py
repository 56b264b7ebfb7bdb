"""The methods: one file each, found by name. Nothing to register.

`get` also takes a user's own file (`my_method.py`) or an importable `package.module`.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from raysim.errors import ConfigError, unknown
from raysim.method import Method

__all__ = ["get", "names", "read_source"]


def names() -> list[str]:
    """Every method of this folder."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def get(spec: str, source: str | None = None) -> type[Method[Any, Any]]:
    """The Method class that `--method SPEC` means. `source` is the text of a user's file, for
    machines that do not have the file itself."""
    if spec in names():
        return _only_method(importlib.import_module(f"methods.{spec}"), spec)
    if spec.endswith(".py"):
        return _only_method(_from_source(spec, source or read_source(spec) or ""), spec)
    if "." in spec and all(part.isidentifier() for part in spec.split(".")):
        try:
            module = importlib.import_module(spec)
        except ModuleNotFoundError as error:
            if error.name and (spec == error.name or spec.startswith(f"{error.name}.")):
                raise ConfigError(f"--method {spec}: there is no module {error.name!r}") from error
            raise
        return _only_method(module, spec)
    raise unknown("method", spec, names(), "--method")


def read_source(spec: str) -> str | None:
    """The text of a user's own method file, None when the method is a module."""
    if not spec.endswith(".py"):
        return None
    try:
        return Path(spec).read_text()
    except OSError as error:
        raise ConfigError(f"--method {spec}: cannot read the file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--method {spec}: cannot read the file (it is not text)") from error


def _from_source(spec: str, source: str) -> ModuleType:
    path = Path(spec).resolve()
    name = f"raysim_user_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__source__", None) == source:
        return loaded
    module = ModuleType(name)
    module.__file__ = str(path)
    vars(module)["__source__"] = source
    sys.modules[name] = module
    if path.parent.is_dir() and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # what the file imports from its own folder
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _only_method(module: ModuleType, spec: str) -> type[Method[Any, Any]]:
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
    ]
    found = list(dict.fromkeys(found))  # a class may have two names
    if len(found) != 1:
        listed = ", ".join(cls.__name__ for cls in found) or "none"
        raise ConfigError(f"--method {spec}: expected one Method class in the file, found {listed}")
    return found[0]
