#!/usr/bin/env bash
# Resolves envs/*.in to envs/*.lock and writes the conda files from the locks. Run it through `make lock`.
#
#   in:   envs/{workflow,cpu,cuda,cpu-vllm-0.31}.in, envs/overrides.txt; names as arguments: only these
#   out:  envs/{workflow,cpu,cuda,cpu-vllm-0.31}.lock: name==version with hashes, complete, without addresses
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

wanted() { [[ -z $names || " $names " == *" $1 "* ]]; }
names=$*

# compile NAME INPUT OPTIONS...: wheels only, so that an installation compiles nothing; the exceptions are SOURCE_ONLY in
# install.sh. manylinux_2_31: the oldest glibc for which every package has a wheel (llguidance wants it).
compile() {
    local name=$1 input=$2
    shift 2
    echo "resolving $name.lock"
    "$tools/uv/bin/uv" pip compile "$input" --output-file "$name.lock" --quiet --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
        --only-binary :all: --no-binary deepspeed --no-binary connection-pool "$@"
}

# uv does not read pip's settings: a folder that holds the CPU wheel of torch has to be passed on.
torch_cpu=()
for link in ${PIP_FIND_LINKS:-"${TORCH_CPU_INDEX:?run this through make lock}/torch/"}; do
    torch_cpu+=(--find-links "$link")
done

if wanted workflow; then compile workflow workflow.in; fi
if wanted cpu; then compile cpu cpu.in --override overrides.txt "${torch_cpu[@]}"; fi
if wanted cuda; then
    # What GPU and CPU environments may differ in: torch's build, and what the CUDA packages pin otherwise.
    grep -oE '^[A-Za-z0-9._-]+==[^ ]+' cpu.lock | grep -vE '^(torch|triton|apache-tvm-ffi|setuptools)==' >"$tools/cpu-versions.txt"
    compile cuda cuda.in --constraint "$tools/cpu-versions.txt"
fi
if wanted cpu-vllm-0.31; then
    # cpu.in with another engine. It starts from cpu.lock, so that only what this engine forces has another version.
    cp cpu.lock cpu-vllm-0.31.lock
    compile cpu-vllm-0.31 cpu.in --override overrides.txt --override cpu-vllm-0.31.in "${torch_cpu[@]}"
fi

"${PYTHON:-python3}" conda_yaml.py
