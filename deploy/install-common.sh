# What the install scripts of the boards share: /opt/fedfit, and the way back from an upgrade. Sourced, not run.
# shellcheck shell=sh
#
#   /opt/fedfit             a link to the environment in use
#   /opt/fedfit.d/STAMP     environments; one that an upgrade replaced is kept until the next upgrade
#
# A script sets `root` (empty, or a directory that stands for / in tests), `python` and `upgrade`, and then calls
# `make_environment` and `use_environment`. Nothing is downloaded but by pip.
# shellcheck disable=SC2154 # those three

fail() {
    echo "$(basename "$0"): $1; nothing was changed" >&2
    exit "${2:-4}"
}

say() {
    echo "$(basename "$0"): $1"
}

require_root() {
    if [ -z "$root" ] && [ "$(id -u)" != 0 ]; then
        fail "this changes the system and needs root: sudo $0 $*"
    fi
}

# Fail unless $python is 3.10 or newer and can make environments; $1 is what else to say.
require_python() {
    command -v "$python" >/dev/null || fail "expected $python, found none: name another with --python"
    version=$("$python" -c 'import sys; print(sys.version_info[0] * 100 + sys.version_info[1])') ||
        fail "$python does not run: name another with --python"
    if [ "$version" -lt 310 ]; then
        shown=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "fedfit needs Python 3.10 or newer, $python is $shown; $1"
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot make environments: sudo apt-get install python3-venv"
}

# The version of torch that $1 (an interpreter) would load; empty if there is none. It is not loaded.
torch_version() {
    "$1" -c '
import importlib.metadata
try:
    print(importlib.metadata.version("torch"))
except importlib.metadata.PackageNotFoundError:
    pass'
}

# Refuse to overwrite, unless this is an upgrade; refuse to upgrade nothing.
require_place() {
    place="$root/opt/fedfit"
    if [ "$upgrade" = no ] && [ -L "$place" ]; then
        fail "$place is there already: upgrade it with --upgrade, or remove it" 8
    fi
    if [ -e "$place" ] && [ ! -L "$place" ]; then
        fail "$place was not made by this script: move it away" 8
    fi
    if [ "$upgrade" = yes ] && [ ! -L "$place" ]; then
        fail "there is nothing to upgrade at $place: leave --upgrade away" 7
    fi
}

# Make a new environment beside the one in use; $1 is yes if it sees the system's packages. Sets `name` and `made`.
make_environment() {
    name="fedfit.d/$(date -u +%Y%m%dT%H%M%SZ)-$$"
    made="$root/opt/$name"
    mkdir -p "$root/opt/fedfit.d"
    trap 'rm -rf "$made"' EXIT
    if [ "$1" = yes ]; then
        "$python" -m venv --system-site-packages "$made"
    else
        "$python" -m venv "$made"
    fi
}

pip_install() {
    "$made/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Put the new environment in use if its doctor is content; otherwise the old one stays, or comes back.
use_environment() {
    old=""
    if [ -L "$place" ]; then
        old=$(readlink "$place")
    fi
    if ! examine; then
        if [ -n "$old" ]; then
            echo "$(basename "$0"): the new version's doctor is not content: the old one stays in use" >&2
        else
            echo "$(basename "$0"): the doctor is not content: nothing was installed" >&2
        fi
        exit 1
    fi
    trap - EXIT
    point_to "$name"
    if [ -n "$old" ] && [ -e "$root/etc/systemd/system/fedfit-device.service" ]; then
        if ! systemctl restart fedfit-device; then
            point_to "$old"
            systemctl restart fedfit-device || true
            rm -rf "$made"
            echo "$(basename "$0"): the service does not start with the new version: back to the old one" >&2
            exit 1
        fi
    fi
    for folder in "$root"/opt/fedfit.d/*; do
        if [ "$folder" != "$made" ] && [ "$folder" != "$root/opt/$old" ]; then
            rm -rf "$folder"
        fi
    done
}

# Everything that must hold before a device runs it; the network and the server are nobody's fault here.
examine() {
    checks="--only torch ${more_checks:-}"
    if [ -e "$root/var/lib/fedfit/device/identity/bundle.json" ]; then
        checks="$checks --only identity --only device-file --only state --only memory --only data --only model"
    fi
    # shellcheck disable=SC2086 # words
    "$made/bin/edge-client" doctor --state-dir "$root/var/lib/fedfit/device" $checks
}

# A link is replaced by renaming another one over it: there is no moment without.
point_to() {
    ln -s "$1" "$place.new"
    mv -T "$place.new" "$place"
}

next_steps() {
    say "/opt/fedfit is ready. Next, with the bundle of this device:"
    echo "  sudo /opt/fedfit/bin/edge-client join NAME.join --data DIR"
    echo "  sudo /opt/fedfit/bin/edge-client doctor"
    echo "  sudo /opt/fedfit/bin/edge-client install-service"
}
