# Sourced by the scripts: makes sure that .venv exists in the clone and holds what pyproject.toml asks for, with an extra.
# Usage: EXTRA=test . scripts/_env.sh   (from the repository root)

PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "raftune needs Python 3.11 or newer; $("$PYTHON" --version 2>&1) was found. Set PYTHON=/path/to/python3.11." >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv

# Installed again only when the requirements change, or when this extra was not there yet.
wanted="${EXTRA:-} $(sha256sum <pyproject.toml)"
stamp=".venv/raftune-installed${EXTRA:+-$EXTRA}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing raftune and what it needs into .venv (a few minutes the first time) ..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${EXTRA:+[$EXTRA]}" >&2 || exit 1
    if [ "${EXTRA:-}" = test ] && command -v nvcc >/dev/null; then
        # Headers alone: what the package asks for besides is for its Python side, hundreds of megabytes of it.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nvidia-cutlass==4.2.0.0 >&2 ||
            echo "CUTLASS's headers could not be installed: tests that compile its kernels are skipped." >&2
    fi
    printf '%s' "$wanted" >"$stamp"
fi
