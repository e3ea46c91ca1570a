#!/bin/sh
# Sets up .venv beside this repository's pyproject.toml: `setup.sh run` for using Baton, `setup.sh test` for
# working on it. Quick when nothing has changed. POSIX sh and a Python's standard library only.
#
# PYTHON       the interpreter to use; otherwise the first fit of python3, python3.13, 3.12, 3.11, 3.14
# TORCH_INDEX  package index asked for a CPU build of torch where there is no NVIDIA GPU
# VENV         where the environment goes; otherwise .venv

set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH='' cd -- "$here/../.." && pwd)
cd "$root"
. "$here/common.sh"

kind=${1:-run}
case $kind in
    run) target=. ;;
    test) target='.[test]' ;;
    *) fail "setup.sh takes 'run' or 'test', not '$kind'." ;;
esac
venv=${VENV:-$root/.venv}
stamp=$venv/.baton-$kind

# The name of the set-up that this tree wants. An environment does not survive being moved, so its path counts.
wanted="$(cat pyproject.toml "$here"/*.sh | cksum) $root"

is_done() {
    [ -x "$venv/bin/baton" ] || return 1
    for candidate in "$stamp" "$venv/.baton-test"; do # what the tests need holds what a run needs
        [ -f "$candidate" ] && [ "$(cat "$candidate")" = "$wanted" ] && return 0
    done
    return 1
}

is_done && exit 0

say "Setting up Baton in $venv"
rm -f "$venv/.baton-run" "$venv/.baton-test"
check_disk "$root" 2 "the environment (PyTorch's CPU build and what it needs)"

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    say "Creating it with $("$python" --version 2>&1) ($python)"
    make_venv "$python" "$venv"
elif ! fits "$venv/bin/python"; then
    fail "$venv was made by $("$venv/bin/python" --version 2>&1); Baton needs Python 3.11 or newer." \
        "Remove it (make clean) and run make again."
fi

log=$venv/setup.log
: >"$log"
. "$here/torch.sh"
install_torch

say "Installing Baton and what it needs"
pip_install -e "$target" || explain "the packages"

printf '%s' "$wanted" >"$stamp"
say "Set up."
