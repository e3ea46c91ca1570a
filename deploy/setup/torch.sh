# Puts torch into the environment: the CPU build where there is no NVIDIA GPU. Sourced by setup.sh.
#
# In order: what is installed already; a wheel that pip is told of locally (find-links); PyTorch's index of CPU
# builds; pip's default index, whose Linux build brings CUDA and is many times the size.

torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
torch=$(sed -n 's/^ *"\(torch==[0-9][0-9.]*\)".*/\1/p' pyproject.toml)

# Does the index answer within a few seconds? Bounded by an alarm, since a name look-up has no time-out of its own.
reachable() {
    "$venv/bin/python" - "$1" <<'PYTHON' >/dev/null 2>&1
import signal
import sys
import urllib.error
import urllib.request

signal.alarm(6)
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5).close()
except urllib.error.HTTPError as error:
    sys.exit(error.code >= 500)
PYTHON
}

has_torch() {
    "$venv/bin/python" - "$torch" <<'PYTHON' 2>/dev/null
import importlib.metadata
import sys

sys.exit(importlib.metadata.version("torch").partition("+")[0] != sys.argv[1].partition("==")[2])
PYTHON
}

install_torch() {
    [ -n "$torch" ] || fail "pyproject.toml names no torch==VERSION."
    if has_torch; then
        return
    fi
    if command -v nvidia-smi >/dev/null 2>&1; then
        say "An NVIDIA GPU is here: $torch comes with CUDA (about 3 GB to download, 7 GB on disk)"
        check_disk "$venv" 8 "PyTorch with CUDA"
        return # installed with the rest, from pip's default index
    fi
    if pip_install --quiet --no-index --no-deps "$torch" >/dev/null 2>&1; then
        say "Took $torch from a local wheel"
        return
    fi
    if [ "$(uname -s)" != Linux ]; then
        return # elsewhere the default index has a CPU build
    fi
    if reachable "$torch_index"; then
        say "Installing $torch, the CPU build (about 190 MB to download)"
        : >"$log"
        pip_install --no-deps --index-url "$torch_index" "$torch" && return
        say "That did not work; trying pip's default index"
    else
        say "$torch_index cannot be reached (TORCH_INDEX names another)"
    fi
    say "Installing $torch from pip's default index: on Linux x86-64 a CUDA build of several GB (Ctrl-C stops)"
    check_disk "$venv" 8 "PyTorch with CUDA"
    : >"$log"
    pip_install "$torch" || explain "$torch"
}
