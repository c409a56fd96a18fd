"""`make chaos-kill`, from a checkout without an installation: see diptych_tests.kill_parts."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = [str(ROOT / "src"), str(ROOT / "tests/support")]

if __name__ == "__main__":
    sys.path[:0] = OURS
    others = os.environ.get("PYTHONPATH")
    os.environ |= {"PYTHONPATH": os.pathsep.join([*OURS, *([others] if others else [])]), "PYTHONSAFEPATH": "1"}
    from diptych_tests.kill_parts import main

    sys.exit(main(sys.argv[1:]))
