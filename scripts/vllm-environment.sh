#!/bin/sh
# vLLM's CPU build in an environment of its own, since its pins differ from the workbook's.
#
#     sh scripts/vllm-environment.sh FOLDER [PYTHON]
#
# On a GPU node, an environment made with `pip install vllm` serves as well: name its Python in WORKBOOK_VLLM_PYTHON.
set -eu
folder=${1:?"usage: sh scripts/vllm-environment.sh FOLDER [PYTHON]"}
python=${2:-python3}
list=$(dirname "$0")/vllm-requirements.txt
torch=$(grep '^torch==' "$list")

echo "building $folder: about 2 minutes and 2.1 GB"
"$python" -m venv --clear "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check -qq"
$pip install --no-deps --no-compile -r "$list"
if ! "$folder/bin/python" -c 'import torch' 2>/dev/null; then
  # pip found the CUDA build alone, which does not load without its libraries
  echo "no CPU build of $torch is offered here: the CUDA build and its libraries come instead (6 GB in all)"
  $pip install --no-compile "$torch" -c "$list"
  $pip uninstall -y triton
fi
"$folder/bin/python" -c 'import importlib.util as u, sys, torch; sys.exit(None if u.find_spec("vllm") else "vllm is not there")'
