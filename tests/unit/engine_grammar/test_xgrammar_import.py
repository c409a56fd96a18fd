"""xgrammar is imported without transformers, and whoever needs transformers later gets the real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = """
import sys
from diptych.engine.grammar import xgrammar_backend
assert not [name for name in sys.modules if name.partition(".")[0] == "transformers"], "it was imported"
import transformers
assert transformers.PreTrainedTokenizerFast.__module__.startswith("transformers.")
"""
BEFORE = """
import sys
import transformers
from diptych.engine.grammar import xgrammar_backend
assert sys.modules["transformers"] is transformers
from xgrammar import tokenizer_info
assert tokenizer_info.PreTrainedTokenizerFast is transformers.PreTrainedTokenizerFast
"""


@pytest.mark.parametrize("program", [LATER, BEFORE], ids=["later", "before"])
def test_transformers_is_not_imported_for_grammars(program: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
