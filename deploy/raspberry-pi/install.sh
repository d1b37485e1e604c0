#!/bin/sh
# Installs fedfit on a Raspberry Pi with Raspberry Pi OS (64 bit) into /opt/fedfit.
#
#   sudo ./install.sh [--upgrade] [--package SPEC] [--python PYTHON] [--torch-index URL] [--keep-cmdline]
#                     [--spare-card] [--root DIR]
#
# It also switches the kernel's memory controller on (a word in cmdline.txt, with a copy of the file beside it; needs a
# restart), so that MemoryMax of the service counts: --keep-cmdline leaves it. --spare-card takes swap off the SD card
# and keeps the journal in memory. README.md tells what was and was not tried.
set -eu

root="" python=python3 package="fedfit[images]" upgrade=no cmdline=yes spare=no
index=https://download.pytorch.org/whl/cpu # a torch without the gigabytes for GPUs
usage="usage: sudo $0 [--upgrade] [--package SPEC] [--python PYTHON] [--torch-index URL] [--keep-cmdline] [--spare-card] [--root DIR]"
while [ $# -gt 0 ]; do
    case "$1" in
        --upgrade) upgrade=yes ;;
        --keep-cmdline) cmdline=no ;;
        --spare-card) spare=yes ;;
        --package | --python | --torch-index | --root)
            if [ $# -lt 2 ]; then
                echo "$usage" >&2
                exit 2
            fi
            case "$1" in
                --package) package=$2 ;;
                --python) python=$2 ;;
                --torch-index) index=$2 ;;
                --root) root=${2%/} ;;
            esac
            shift ;;
        -h | --help)
            echo "$usage"
            exit 0 ;;
        *)
            echo "$usage" >&2
            exit 2 ;;
    esac
    shift
done
# shellcheck source=deploy/install-common.sh
. "$(dirname "$0")/../install-common.sh"

check_board() {
    model=$(tr -d '\0' < "$root/proc/device-tree/model" 2>/dev/null || true)
    case "$model" in
        "Raspberry Pi"*) ;;
        *) fail "this is no Raspberry Pi: $root/proc/device-tree/model says '${model:-nothing}'" ;;
    esac
    bits=$("$python" -c 'import struct; print(8 * struct.calcsize("P"))' 2>/dev/null || echo unknown)
    if [ "$bits" != 64 ]; then
        fail "expected a 64-bit system, $python has $bits bits: there is no torch for 32; write the 64-bit image of Raspberry Pi OS to the card"
    fi
}

# The one line of the kernel's command line; older images have it elsewhere.
cmdline_file() {
    for file in "$root/boot/firmware/cmdline.txt" "$root/boot/cmdline.txt"; do
        if [ -f "$file" ]; then
            echo "$file"
            return
        fi
    done
}

# `memory ... 1` in /proc/cgroups, or the controller's name in version 2
has_memory_controller() {
    grep -qw memory "$root/sys/fs/cgroup/cgroup.controllers" 2>/dev/null ||
        awk '$1 == "memory" && $4 == 1 { found = 1 } END { exit !found }' "$root/proc/cgroups" 2>/dev/null
}

switch_memory_controller_on() {
    file=$(cmdline_file)
    if has_memory_controller; then
        return
    fi
    if [ "$cmdline" = no ] || [ -z "$file" ]; then
        say "the kernel's memory controller stays off: MemoryMax has no effect, fedfit's own guard holds"
    elif grep -qw 'cgroup_enable=memory' "$file"; then
        say "restart the board: cgroup_enable=memory is in $file, but the running kernel does not have it yet"
    else
        cp -p "$file" "$file.before-fedfit"
        sed -i '1s/$/ cgroup_enable=memory/' "$file"
        say "added cgroup_enable=memory to $file (before: $file.before-fedfit); restart the board for it"
    fi
}

# Swap and the journal are what writes to a card when nobody looks; zram swaps into memory and may stay.
spare_the_card() {
    if [ -e "$root/etc/dphys-swapfile" ]; then
        systemctl disable --now dphys-swapfile
        say "swap is off the card (dphys-swapfile); fedfit never counts swap"
    fi
    mkdir -p "$root/etc/systemd/journald.conf.d"
    printf '[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\n' > "$root/etc/systemd/journald.conf.d/fedfit.conf"
    systemctl restart systemd-journald
    say "the journal stays in memory, 32 MB at most, and is gone after a restart"
}

install_packages() {
    pip_install --index-url "$index" torch
    pip_install "$package"
    say "torch $(torch_version "$made/bin/python"), fedfit from $package"
}

require_root "$@"
require_python "Raspberry Pi OS has it since bookworm (2023)"
check_board
require_place
make_environment no
install_packages
use_environment
switch_memory_controller_on
if [ "$spare" = yes ]; then
    spare_the_card
fi
next_steps
