# Shared by the set-up scripts: words for people, checks, and pip. Sourced, never run.

say() {
    printf '==> %s\n' "$*"
}

# fail LINE...: say what is wrong and what to do about it, and stop.
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do
        printf '       %s\n' "$line" >&2
    done
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The interpreter to build on. Prints its path.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a program that can be run."
        fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); Baton needs Python 3.11 or newer."
        command -v "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$name" >/dev/null 2>&1 && fits "$name"; then
            command -v "$name"
            return
        fi
    done
    if command -v python3 >/dev/null 2>&1; then
        fail "python3 is $(python3 --version 2>&1); Baton needs Python 3.11 or newer." \
            "Install one (Debian and Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python)" \
            "and run make again, or name one that you have: make run PYTHON=/path/to/python3.11"
    fi
    fail "there is no python3 here; Baton needs Python 3.11 or newer." \
        "Install one (Debian and Ubuntu: apt install python3 python3-venv; macOS: brew install python)."
}

# make_venv PYTHON DIR
make_venv() {
    "$1" -c 'import venv, ensurepip' 2>/dev/null || fail \
        "$1 has no venv module, which Debian and Ubuntu ship apart." \
        "Install it: apt install python3-venv (for another version: python3.11-venv), and run make again."
    "$1" -m venv --clear "$2" || fail "could not create $2 (see above)." \
        "Is the folder writable, and is there space on the disk?"
}

# check_disk DIR GIGABYTES WHAT-FOR
check_disk() {
    free=$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print $4 }')
    case $free in
        '' | *[!0-9]*) return 0 ;; # a file system that does not say
    esac
    if [ "$free" -lt $(($2 * 1000 * 1000)) ]; then
        fail "$1 has $((free / 1000)) MB free; $3 takes about $2 GB." \
            "Free some space, or clone the repository where there is more."
    fi
}

# pip_install ARGUMENT...: a progress bar on a terminal, plain lines otherwise; everything also goes to the log.
pip_install() {
    if [ -t 1 ]; then bar=on; else bar=off; fi
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar "$bar" --log "$log" "$@"
}

# explain WHAT: pip has just failed to install it; say why in a line, and stop.
explain() {
    if grep -qi 'No space left on device' "$log"; then
        fail "the disk filled up while installing $1." "Free some space (about 2 GB) and run make again."
    fi
    if grep -qiE 'NewConnectionError|NameResolutionError|Failed to resolve|name resolution|Network is unreachable|ConnectTimeout|Read timed out|Connection refused|ProxyError' "$log"; then
        fail "the package index could not be reached while installing $1." \
            "Check the network, or set PIP_INDEX_URL (a mirror) or HTTPS_PROXY, and run make again; it goes on from here."
    fi
    if grep -qi 'No matching distribution found' "$log"; then
        fail "there is no build of $1 for $("$venv/bin/python" --version 2>&1) on $(uname -s) $(uname -m)." \
            "Python 3.11 to 3.13 on Linux x86-64 is what is tested: make clean, then make run PYTHON=python3.11"
    fi
    fail "could not install $1: see above, and $log for all of it."
}
