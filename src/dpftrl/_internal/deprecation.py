"""Old names of version 0.1 that still work, with a warning; see `docs/migrating.md`."""

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

# Packages and modules that users may have imported: old name to new name.
MODULES: Final = {
    "dpftrl.audit": "dpftrl.verify",
    "dpftrl.engines.flower": "dpftrl.flower",
    "dpftrl.engines.local": "dpftrl.simulation",
    "dpftrl.observed": "dpftrl.accounting.logs",
    "dpftrl.report": "dpftrl.statement",
    "dpftrl.sensitivity": "dpftrl.mechanisms",
    "dpftrl.tasks.evaluation": "dpftrl.tasks.language_model",
}
# Names in `dpftrl` itself: old name to new name.
NAMES: Final = {"Loss": "ErrorReport"}


def warn(old: str, new: str) -> None:
    """Warn that a name is deprecated; Python shows the warning once per calling line."""
    message = f"{old} is now {new}; the old name will be removed in 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that still accepts the old name of a keyword argument, with a warning."""

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
    """An import hook that gives the new module for an old module name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module spec for an old name, and None for any other name."""
        del path, target
        is_old = fullname in MODULES or fullname == "dpftrl.engines"
        return ModuleSpec(fullname, self, is_package=True) if is_old else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an ordinary module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module by the renamed one, so that both names give the same objects."""
        old = module.__name__
        if old in MODULES:
            warn(old, MODULES[old])
            sys.modules[old] = importlib.import_module(MODULES[old])


def install() -> None:
    """Make old module names importable."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        # The finder comes first, because an upgrade may have left folders of an older version.
        sys.meta_path.insert(0, OldModules())
