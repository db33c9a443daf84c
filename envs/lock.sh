#!/usr/bin/env bash
# Resolves envs/*.in to envs/*.lock and writes the conda files from the locks. Run it through `make lock`.
#
#   in:   envs/{workflow,cpu,cuda}.in, envs/overrides.txt
#   out:  envs/{workflow,cpu,cuda}.lock: name==version with hashes, complete, without addresses
#         envs/{workflow,cpu,cuda}.yaml
#
# Reads metadata only, so the CUDA lock is made on any machine. Versions in an existing lock are kept where the pins still
# allow them; delete the lock first to move everything to the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools/uv"
"$tools/uv/bin/python" -m pip install --quiet uv

# Wheels only, so that an installation compiles nothing; the exceptions are SOURCE_ONLY in install.sh.
# manylinux_2_31: the oldest glibc for which every package has a wheel (llguidance wants it).
compile() {
    local name=$1
    shift
    echo "resolving $name.in"
    "$tools/uv/bin/uv" pip compile "$name.in" --output-file "$name.lock" --quiet --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
        --only-binary :all: --no-binary deepspeed --no-binary connection-pool "$@"
}

# uv does not read pip's settings: a folder that holds the CPU wheel of torch has to be passed on.
torch_cpu=()
for link in ${PIP_FIND_LINKS:-"${TORCH_CPU_INDEX:?run this through make lock}/torch/"}; do
    torch_cpu+=(--find-links "$link")
done

compile workflow
compile cpu --override overrides.txt "${torch_cpu[@]}"

# What GPU and CPU environments may differ in: torch's build, and what the CUDA packages pin otherwise.
grep -oE '^[A-Za-z0-9._-]+==[^ ]+' cpu.lock | grep -vE '^(torch|triton|apache-tvm-ffi|setuptools)==' >"$tools/cpu-versions.txt"
compile cuda --constraint "$tools/cpu-versions.txt"

"${PYTHON:-python3}" conda_yaml.py
