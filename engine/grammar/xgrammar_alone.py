"""xgrammar without torch and transformers for the compiling process, and without transformers for the worker.

`import xgrammar` imports both, for the tensors and the tokenizers of its other users: 1.8 s of CPU time and 160 MB. What
compiles needs neither. A worker has torch, and transformers alone is 0.8 s and 30 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, cast

_PARTS = {
    "tokenizer_info": ("TokenizerInfo", "VocabType"),
    "compiler": ("GrammarCompiler",),
    "grammar": ("Grammar",),
}
"""What xgrammar_backend.py needs to compile, by module."""


def import_alone() -> None:
    """Afterwards `import xgrammar` finds a module with what compiles, and `import torch` raises ImportError: call it in a
    process that needs torch for nothing else.

    Raises: ImportError or AttributeError when this xgrammar needs more. The process cannot import it any more, then.
    """
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed", name="xgrammar")
    cast("dict[str, Any]", sys.modules)["torch"] = None
    sys.modules["transformers"] = _NamesOnly("transformers")
    # The package with its path, but without what its __init__ imports.
    package: Any = importlib.util.module_from_spec(spec)
    sys.modules["xgrammar"] = package
    for module in ("exception", "load_binding"):  # in the order of its __init__
        importlib.import_module(f"xgrammar.{module}")
    for module, names in _PARTS.items():
        found = importlib.import_module(f"xgrammar.{module}")
        for name in names:
            setattr(package, name, getattr(found, name))


def import_beside_torch() -> Any:
    """The whole xgrammar, or what import_alone made of it. transformers is not imported for it; whoever imports that
    later gets the real one. Raises: ImportError."""
    if "xgrammar" in sys.modules or "transformers" in sys.modules:
        return importlib.import_module("xgrammar")
    importlib.import_module("torch")  # first, so that nothing but xgrammar is imported below
    sys.modules["transformers"] = _NamesOnly("transformers")
    try:
        return importlib.import_module("xgrammar")
    finally:
        del sys.modules["transformers"]


class _NamesOnly(ModuleType):
    """Any name is a class that nothing is an instance of: xgrammar wants tokenizers' classes for annotations."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
