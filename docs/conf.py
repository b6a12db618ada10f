"""How Sphinx builds the documentation site: `make docs`."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import dpftrl
from dpftrl.centralized.owner import TrainingOwner

HERE = Path(__file__).parent

project = "dpftrl"
author = "The dpftrl authors"
version = release = dpftrl.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# Readers paste options and code: two hyphens stay two hyphens, and quotes stay straight.
smartquotes = False
html_theme = "furo"
html_title = "dpftrl"
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
# Docstrings are Markdown in spirit: one backtick is code, not a reference.
default_role = "code"
napoleon_use_ivar = True

# The packages whose `__all__` is public, with a sentence about each.
PUBLIC = {
    "dpftrl": "What most programs need. Each name is loaded when it is first used.",
    "dpftrl.torch": "Private training in a PyTorch loop. Extra: `torch`.",
    "dpftrl.torch.opacus": "Correlated noise for users of Opacus. Extra: `opacus`.",
    "dpftrl.torch.distributed": "Private training by several processes: DDP and FSDP2.",
    "dpftrl.torch.device_noise": "Noise on the device where the sum is, with PyTorch.",
    "dpftrl.jax": "Private training in a JAX loop. Extra: `jax`.",
    "dpftrl.flower": "A fleet of clients on Flower. Extra: `flower`.",
    "dpftrl.simulation": "A fleet of simulated clients. Extra: `train`, but none for `simulate`.",
    "dpftrl.tasks": "Texts and language models to train with. Extra: `train`.",
    "dpftrl.federated": "The server of a fleet, without an engine.",
    "dpftrl.centralized": "Training on a data set, without a framework.",
    "dpftrl.participation": "Who can take part, and when.",
    "dpftrl.mechanisms": "How noise is correlated.",
    "dpftrl.optimize": "The best mechanism for a participation.",
    "dpftrl.accounting": "What noise guarantees.",
    "dpftrl.accounting.logs": "Logs of who took part.",
    "dpftrl.plan": "From a fleet or a data set to a plan.",
    "dpftrl.plan.device": "More noise for noise on a device.",
    "dpftrl.noise": "The noise itself.",
    "dpftrl.statement": "What may be published.",
    "dpftrl.verify": "A second computation of the guarantee of a run.",
    "dpftrl.auditing": "Attacks on a mechanism or a run, beside its claim. Extra: `audit`.",
    "dpftrl.models": "Released models: load them, use them, describe them.",
    "dpftrl.tuning": "Settings of a training, chosen on public text. Extra: `train`.",
    "dpftrl.status": "How a run is doing.",
    "dpftrl.paper": "The paper, recomputed.",
    "dpftrl.errors": "What can go wrong.",
}


def _public_names(module: object) -> list[str]:
    """The names of `__all__`, or all public classes and functions that the module defines."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return sorted(names, key=str.lower)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def write_api_pages(_app: object) -> None:
    """Write one page per public package, with one entry per public name."""
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        old.unlink()
    documented: set[int] = set()  # every object has one entry; other packages refer to it
    index = ["API reference", "=" * 13, "", ".. toctree::", "   :maxdepth: 1", ""]
    for package, sentence in PUBLIC.items():
        module = importlib.import_module(package)
        sentence = sentence.replace("`", "``")
        lines = [package, "=" * len(package), "", sentence, ""]
        for name in _public_names(module):
            value = getattr(module, name)
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            if inspect.ismodule(value):
                continue
            lines += [f".. auto{kind}:: {package}.{name}"]
            if id(value) in documented and kind != "data":
                lines += ["   :no-index:"]
            if kind == "class":
                lines += ["   :members:", "   :show-inheritance:"]
                if issubclass(value, TrainingOwner):  # which has no page of its own
                    lines += ["   :inherited-members:"]
            lines += [""]
            documented.add(id(value))
        (folder / f"{package}.rst").write_text("\n".join(lines))
        index.append(f"   {package}")
    (folder / "index.rst").write_text("\n".join(index) + "\n")


def keep_backslashes(_app: object, _context: object, lines: list[str]) -> None:
    """Escape the backslashes of help texts: reStructuredText would drop them."""
    lines[:] = [line.replace("\\", "\\\\") for line in lines]


def keep_colons(_app: object, what: str, *others: Any) -> None:
    """Keep a colon in the first line of a property: Napoleon takes what is before it for a type.

    An empty comment becomes the first line.
    """
    lines = others[-1]
    if what == "property" and lines and ":" in lines[0]:
        lines[:0] = ["..", ""]


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before Napoleon
    app.connect("builder-inited", write_api_pages)
    app.connect("sphinx-click-process-description", keep_backslashes)
    app.connect("sphinx-click-process-options", keep_backslashes)
