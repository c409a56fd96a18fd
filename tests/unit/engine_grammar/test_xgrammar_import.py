"""xgrammar is imported without transformers, and whoever needs transformers later gets the real one."""

from __future__ import annotations

import subprocess
import sys

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


EACH_IN_A_FORK = """
import os, sys
import torch  # which takes most of the time, and which each of them imports
failed = 0
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(program)
        sys.exit()
    failed |= os.waitpid(child, 0)[1]
sys.exit(failed != 0)
"""


def test_transformers_is_not_imported_for_grammars() -> None:
    command = [sys.executable, "-P", "-c", EACH_IN_A_FORK, LATER, BEFORE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
