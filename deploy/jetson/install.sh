#!/bin/sh
# Installs fedfit on an NVIDIA Jetson into /opt/fedfit, with the torch that NVIDIA made for it.
#
#   sudo ./install.sh [--upgrade] [--package SPEC] [--torch FILE.whl] [--python PYTHON] [--cpu] [--root DIR]
#
# JetPack 6 (Python 3.10), 7 and 7.2 (Python 3.12): the environment sees the system's packages, and NVIDIA's torch stays as
# it is. JetPack 5 has Python 3.8, and NVIDIA's torch is for that one alone: refused, or --cpu --python python3.10 with
# a torch without CUDA. JetPack 4 and older: refused. README.md tells what was and was not tried.
set -eu

root="" python=python3 package="fedfit[images]" torch="" upgrade=no cpu=no
usage="usage: sudo $0 [--upgrade] [--package SPEC] [--torch FILE.whl] [--python PYTHON] [--cpu] [--root DIR]"
while [ $# -gt 0 ]; do
    case "$1" in
        --upgrade) upgrade=yes ;;
        --cpu) cpu=yes ;;
        --package | --torch | --python | --root)
            if [ $# -lt 2 ]; then
                echo "$usage" >&2
                exit 2
            fi
            case "$1" in
                --package) package=$2 ;;
                --torch) torch=$2 ;;
                --python) python=$2 ;;
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

# `# R36 (release), REVISION: 4.3, ...` as 36
jetson_linux() {
    if [ ! -r "$root/etc/nv_tegra_release" ]; then
        fail "this is no Jetson: $root/etc/nv_tegra_release is not there"
    fi
    sed -n 's/^# R\([0-9][0-9]*\) (release).*/\1/p' "$root/etc/nv_tegra_release" | head -n 1
}

check_jetpack() {
    release=$(jetson_linux)
    case "$release" in
        36) jetpack=6 ;;
        38) jetpack=7 ;;
        39) jetpack=7.2 ;;
        34 | 35) jetpack=5 ;;
        32 | 28) fail "JetPack 4 and older (Jetson Linux R$release) have Python 3.6: fedfit needs 3.10; flash JetPack 6 if the board has it" ;;
        "") fail "$root/etc/nv_tegra_release does not begin with a release: expected a line like '# R36 (release), REVISION: 4.3'" ;;
        *) fail "Jetson Linux R$release is not known to this script: it knows R36 (JetPack 6), R38 (JetPack 7) and R39 (JetPack 7.2)" ;;
    esac
    if [ "$jetpack" = 5 ] && [ "$cpu" = no ]; then
        fail "JetPack 5 (Jetson Linux R$release) has Python 3.8, NVIDIA's torch is for that one alone, and fedfit needs 3.10: flash JetPack 6, or train on the CPU: --cpu --python python3.10"
    fi
}

check_torch() {
    found=$(torch_version "$python")
    if [ "$cpu" = no ] && [ -z "$found" ] && [ -z "$torch" ]; then
        fail "NVIDIA's torch for JetPack $jetpack is not installed for $python: install it as README.md tells, name its file with --torch, or type --cpu for a torch without CUDA"
    fi
    if [ -n "$torch" ] && [ ! -r "$torch" ]; then
        fail "cannot read --torch $torch" 3
    fi
}

# pip may add what is missing and change nothing that NVIDIA installed: a constraint makes it fail instead.
install_packages() {
    if [ -n "$torch" ]; then
        pip_install "$torch"
    fi
    kept=$(torch_version "$made/bin/python")
    if [ "$cpu" = no ]; then
        echo "torch==$kept" > "$made/kept.txt"
        pip_install --constraint "$made/kept.txt" "$package"
    else
        pip_install "$package"
    fi
    now=$(torch_version "$made/bin/python")
    if [ "$cpu" = no ] && [ "$now" != "$kept" ]; then
        echo "install.sh: pip replaced torch $kept by $now: refused" >&2
        exit 4
    fi
    say "torch $now, fedfit from $package"
}

require_root "$@"
check_jetpack
require_python "JetPack 6 has 3.10, JetPack 7 and 7.2 have 3.12"
check_torch
if [ "$cpu" = no ]; then
    more_checks="--only accelerator" # a torch without CUDA, or without kernels for this GPU, is noticed here
fi
require_place
if [ "$cpu" = yes ]; then
    make_environment no
else
    make_environment yes
fi
install_packages
use_environment
next_steps
