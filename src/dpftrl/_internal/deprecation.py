"""Names of version 0.1 that still work for one version, with a warning; see `docs/migrating.md`."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Packages and modules that users may have imported: the old name and the new one.
MODULES: Final = {
    "dpftrl.audit": "dpftrl.verify",
    "dpftrl.engines.flower": "dpftrl.flower",
    "dpftrl.engines.local": "dpftrl.simulation",
    "dpftrl.observed": "dpftrl.accounting.logs",
    "dpftrl.report": "dpftrl.statement",
    "dpftrl.sensitivity": "dpftrl.mechanisms",
}
# Names in `dpftrl` itself.
NAMES: Final = {"Loss": "ErrorReport"}


def warn(old: str, new: str) -> None:
    """Say once per place that a name will go."""
    warnings.warn(f"{old} is now {new}; the old name goes in 0.3", DeprecationWarning, stacklevel=3)


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let callers still use the old name of a keyword argument."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old not in kwargs:
                return function(*args, **kwargs)
            warn(f"the argument {old} of {function.__name__}", new)
            renamed: dict[str, Any] = {new if k == old else k: v for k, v in kwargs.items()}
            return function(*args, **renamed)

        return call

    return decorate


class OldModules(MetaPathFinder, Loader):
    """Gives the new module to whoever imports an old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for old names alone."""
        del path, target
        is_old = fullname in MODULES or fullname == "dpftrl.engines"
        return ModuleSpec(fullname, self, is_package=True) if is_old else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in its place, so that both names mean the same objects."""
        old = module.__name__
        if old in MODULES:
            warn(old, MODULES[old])
            sys.modules[old] = importlib.import_module(MODULES[old])


def install() -> None:
    """Let old module names be imported."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        # First, since folders of an older version may be left where the package is.
        sys.meta_path.insert(0, OldModules())
