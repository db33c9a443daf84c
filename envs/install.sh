#!/usr/bin/env bash
# Builds one Python environment from its lock and links it as .venvs/NAME.
#
#   in:   envs/NAME.lock, Python 3.11
#   out:  ${EAGLE3_CACHE:-~/.cache/eagle3-flow}/envs/NAME-<hash of lock and this script>, shared by all clones of a user
#
# Run it through `make env`. A second run takes a second and writes nothing but the link, so that a folder which one user
# filled serves others who may only read it; an interrupted run starts anew. Environment variables:
#   PYTHON           the Python 3.11 to use, if it is not on PATH as python3.11 or python3
#   EAGLE3_CACHE     where environments are kept, e.g. on a cluster's shared disk (docs/environments.md)
#   TORCH_CPU_INDEX  index of PyTorch's CPU wheels (set by the Makefile), asked only where pip does not find the wheel itself
set -euo pipefail

# Packages published without a wheel. They are built last and without isolation: deepspeed's setup.py imports torch, and
# a build in isolation would fetch build tools that no lock pins.
SOURCE_ONLY='deepspeed|connection-pool'
export DS_BUILD_OPS=0    # deepspeed: leave out the C++/CUDA ops, no compiler is needed; DeepSpeed builds what it uses on demand

fail() { echo "envs/install.sh: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=${1:-}
lock=$root/envs/$name.lock
[[ -n $name && -f $lock ]] || fail "expected one of: $(cd "$root/envs" && basename -s .lock -a ./*.lock | xargs); got '$name'"

digest=$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-12)
cache=$(realpath -ms "${EAGLE3_CACHE:-$HOME/.cache/eagle3-flow}")/envs
venv=$cache/$name-$digest
link=$root/.venvs/$name
stamp=.complete    # written last: without it the folder is the rest of an interrupted build

# A stamp beside a Python that is gone (upgraded, moved) is no environment either.
ready() { [[ -f $1/$stamp && -x $1/bin/python ]]; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 is needed (the locks are made for it); found $(python3 --version 2>&1). Install it or set PYTHON=/path/to/python3.11"
}

# The lock's blocks (a requirement and its hashes) whose package does ("yes") or does not ("no") match the names in $2.
blocks() {
    awk -v want="$1" -v names="^($2)==" '/^[A-Za-z0-9]/ { hit = ($0 ~ names) ? "yes" : "no" } hit == want' "$lock"
}

# pip says nothing while it unpacks for minutes, and far too much before: one line every 15 seconds instead. It ends with
# this script even if that is killed, and a sleeping one holds neither the lock nor anybody's pipe open.
heartbeat() {
    local total
    total=$(grep -c '^[A-Za-z0-9].*==' "$lock")
    while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        echo "[$name] $SECONDS s: $(grep -cE '^(Collecting|Processing) ' "$log") collected," \
            "$(find "$venv/lib" -maxdepth 4 -name '*.dist-info' | wc -l) installed, of $total"
    done
}

pip_install() {
    if ! "$venv/bin/python" -m pip install --no-input --no-deps --require-hashes --progress-bar off "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        fail "pip could not install $name; the whole log is $log"
    fi
}

install_torch_cpu() {
    local torch=$1 index=()
    if ! "$venv/bin/python" -m pip install --dry-run --no-deps --require-hashes -r "$torch" >/dev/null 2>&1; then
        [[ -n ${TORCH_CPU_INDEX:-} ]] || fail "pip does not find $(head -n 1 "$torch" | cut -d' ' -f1): run \`make env\`, which knows its index"
        index=(--extra-index-url "$TORCH_CPU_INDEX")
    fi
    pip_install "${index[@]}" -r "$torch"
}

build() {
    local python requirements=$venv/requirements pulse
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make environments: install python3-venv (Debian: apt-get install python3-venv)"
    echo "[$name] building $venv; log: $log"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    mkdir "$requirements"
    : >"$log"
    blocks yes 'torch' >"$requirements/torch.txt"
    blocks yes "$SOURCE_ONLY" >"$requirements/source.txt"
    blocks no "torch|$SOURCE_ONLY" >"$requirements/wheels.txt"

    heartbeat 9>&- &
    pulse=$!
    trap "kill $pulse 2>/dev/null || true" EXIT
    if grep -q '+cpu' "$requirements/torch.txt"; then
        install_torch_cpu "$requirements/torch.txt"
    elif [[ -s $requirements/torch.txt ]]; then
        pip_install -r "$requirements/torch.txt"
    fi
    pip_install --only-binary :all: -r "$requirements/wheels.txt"
    [[ ! -s $requirements/source.txt ]] || pip_install --no-build-isolation -r "$requirements/source.txt"
    kill "$pulse"
    touch "$venv/$stamp"
    echo "[$name] ready after $SECONDS s"
}

# What an earlier call linked stays, wherever it lies: EAGLE3_CACHE is needed once, not in every shell.
if [[ -z ${EAGLE3_CACHE:-} && $(readlink "$link") == */"$name-$digest" ]] && ready "$link"; then exit; fi
mkdir -p "$root/.venvs"
if ! ready "$venv"; then
    mkdir -p "$cache"
    log=$cache/$name-$digest.log
    exec 9>"$cache/$name-$digest.lock"
    flock --nonblock 9 || { echo "[$name] another process builds it; waiting"; flock 9; }
    ready "$venv" || build
fi
ln -sfnT "$venv" "$link"
