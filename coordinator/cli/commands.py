"""The table of `coordinator`'s commands: what its help pages list, in this order, and where each command is defined."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from edge_client.operate import command_line
from edge_client.operate.command_line import Command

__all__ = ["PROGRAM", "complete_options", "completion_options", "run"]

_EVERYDAY = "Everyday commands"
_TRY = "Try it without devices"
_LOOK_UP = "Look up"
_SERVER = "Look after the server"

_DEVICE = Command(
    name="device",
    summary="add, list and label the devices of this federation",
    group=_EVERYDAY,
    commands=(
        Command(
            name="add",
            summary="enrol devices and write a join bundle for each",
            options="coordinator.cli.devices:add_options",
            examples=("coordinator device add kitchen attic", "coordinator device add cam-{01..12} --label line=a"),
        ),
        Command(
            name="list",
            summary="list the enrolled devices and what each one is doing",
            options="coordinator.cli.devices:list_options",
            examples=("coordinator device list", "coordinator device list -q"),
        ),
        Command(
            name="show",
            summary="show a device's hardware, memory budget, labels and latest failures",
            options="coordinator.cli.devices:show_options",
            examples=("coordinator device show kitchen", "coordinator device show kitchen --format json"),
        ),
        Command(
            name="label",
            summary="set or remove the labels by which runs choose devices",
            options="coordinator.cli.devices:label_options",
            examples=("coordinator device label kitchen line=a", "coordinator device label kitchen line-"),
        ),
        Command(
            name="remove",
            summary="remove devices from the federation; they are disconnected at once",
            options="coordinator.cli.devices:remove_options",
            examples=("coordinator device remove kitchen", "coordinator device remove cam-{01..12}"),
        ),
    ),
)
_RUN = Command(
    name="run",
    summary="start, watch, stop and export training runs",
    group=_EVERYDAY,
    commands=(
        Command(
            name="start",
            summary="start a run, or queue it behind the one that is training",
            options="coordinator.cli.runs:start_options",
            examples=(
                "coordinator run start photos/run.toml --dry-run",
                "coordinator run start photos/run.toml --follow",
            ),
        ),
        Command(
            name="list",
            summary="list all runs",
            options="coordinator.cli.runs:list_options",
            examples=("coordinator run list", "coordinator run list --format json"),
        ),
        Command(
            name="show",
            summary="show the rounds, results, devices and failures of a run",
            options="coordinator.cli.runs:show_options",
            examples=("coordinator run show latest --follow", "coordinator run show photos-2 --timeline"),
        ),
        Command(
            name="stop",
            summary="end a run after its current round and keep its last model",
            options="coordinator.cli.runs:stop_options",
            examples=("coordinator run stop latest", "coordinator run stop photos-2 --now"),
        ),
        Command(
            name="report",
            summary="write one HTML page with plots about a run, or about simulations",
            options="coordinator.cli.runs:report_options",
            examples=("coordinator run report latest", "coordinator run report simulations --out methods.html"),
        ),
        Command(
            name="export",
            summary="write a run's model as an ONNX file that was checked against torch",
            options="coordinator.cli.export:add_options",
            examples=(
                "coordinator run export latest --onnx photos.onnx",
                "coordinator run export photos-2 --onnx photos.onnx --version last --int8",
            ),
        ),
        Command(
            name="deploy",
            summary="send a run's model to devices, which test it before they use it",
            options="coordinator.cli.deploy:add_options",
            examples=("coordinator run deploy latest --label line=a", "coordinator run deploy latest --status"),
        ),
    ),
)
_METHODS = Command(
    name="methods",
    summary="list the training methods, and show what one of them exchanges",
    group=_LOOK_UP,
    commands=(
        Command(
            name="list",
            summary="list all methods, and those that combine with others",
            options="coordinator.cli.methods:list_options",
            examples=("coordinator methods list", "coordinator methods list -q"),
        ),
        Command(
            name="show",
            summary="show a method's parameters, what it exchanges, and its bytes per round and device",
            options="coordinator.cli.methods:show_options",
            examples=("coordinator methods show fedprox", "coordinator methods show heterofl --model resnet18"),
        ),
    ),
)
_MODELS = Command(
    name="models",
    summary="list the built-in models, and show the units and memory of one of them",
    group=_LOOK_UP,
    commands=(
        Command(
            name="list",
            summary="list all built-in models",
            options="coordinator.cli.models:list_options",
            examples=("coordinator models list", "coordinator models list -q"),
        ),
        Command(
            name="show",
            summary="show the units, shapes, parameters and memory of a model, or of a slice of it",
            options="coordinator.cli.models:show_options",
            examples=(
                "coordinator models show resnet18 --input 3x96x96",
                "coordinator models show resnet18 --slice width:1/2",
            ),
        ),
    ),
)
_PAGE = Command(
    name="page",
    summary="open the live page: a link for a browser, and tokens for screens and scripts",
    group=_EVERYDAY,
    commands=(
        Command(
            name="link",
            summary="print an address that signs one browser in, once, within ten minutes",
            options="coordinator.cli.page:link_options",
            examples=("coordinator page link", "coordinator page link --read"),
        ),
        Command(
            name="token",
            summary="add, list and remove the tokens that may use the page and its API",
            commands=(
                Command(
                    name="add",
                    summary="make a token and print it, once; only its hash is stored",
                    options="coordinator.cli.page:token_add_options",
                    examples=("coordinator page token add wall-screen", "coordinator page token add anna --operate"),
                ),
                Command(
                    name="list",
                    summary="list the tokens, and when each was used last",
                    options="coordinator.cli.page:token_list_options",
                    examples=("coordinator page token list", "coordinator page token list --format json"),
                ),
                Command(
                    name="remove",
                    summary="remove a token; whoever uses it is signed out",
                    options="coordinator.cli.page:token_remove_options",
                    examples=("coordinator page token remove wall-screen",),
                ),
            ),
        ),
    ),
)
PROGRAM = Command(
    name="coordinator",
    summary="run a federation: train one model on many devices without collecting their data",
    examples=("coordinator demo", "coordinator start --advertise 192.168.1.10"),
    commands=(
        Command(
            name="start",
            summary="run the coordinator, with its own MQTT broker unless --broker names one",
            options="coordinator.cli.server:start_options",
            group=_EVERYDAY,
            examples=(
                "coordinator start --advertise 192.168.1.10",
                "coordinator start --listen 127.0.0.1:1883    # devices on this machine only",
            ),
        ),
        Command(
            name="status",
            summary="show whether the coordinator runs, which devices are online and what it is training",
            options="coordinator.cli.status:status_options",
            group=_EVERYDAY,
            examples=("coordinator status", "coordinator status --format json"),
        ),
        Command(
            name="stop",
            summary="stop the coordinator; a run continues at the next start",
            options="coordinator.cli.status:stop_options",
            group=_EVERYDAY,
            examples=("coordinator stop",),
        ),
        Command(
            name="new",
            summary="write a run file to begin with, made for your data",
            options="coordinator.cli.folders:new_options",
            group=_EVERYDAY,
            examples=(
                "coordinator new photos --data ./examples",
                "coordinator new digits --classes 0,1,2,3,4,5,6,7,8,9 --input 1x8x8",
            ),
        ),
        _DEVICE,
        _RUN,
        _PAGE,
        Command(
            name="demo",
            summary="train on four devices with four memory budgets, all on this machine, in about a minute",
            options="coordinator.cli.demo_command:add_options",
            group=_TRY,
            examples=("coordinator demo", "coordinator demo --seed 2 --keep demo"),
        ),
        Command(
            name="simulate",
            summary="train on virtual devices of this machine, from a run file or from options",
            options="coordinator.cli.simulate:add_options",
            group=_TRY,
            examples=(
                "coordinator simulate --model preresnet20 --devices 20",
                "coordinator simulate --method fedavg,fedprox --seed 1,2,3 --out results",
            ),
        ),
        Command(
            name="compare",
            summary="compare simulations: mean and spread over seeds, rounds and bytes to a target, memory peaks",
            options="coordinator.cli.compare:add_options",
            group=_TRY,
            examples=("coordinator compare results", "coordinator compare results --target 0.9 --format md"),
        ),
        _METHODS,
        _MODELS,
        Command(
            name="doctor",
            summary="check this server, and suggest a fix for each check that fails",
            options="coordinator.cli.server:doctor_options",
            group=_SERVER,
            examples=("coordinator doctor", "sudo coordinator doctor --as-service"),
        ),
        Command(
            name="backup",
            summary="write everything that a coordinator needs to continue into one file, also while it runs",
            options="coordinator.cli.folders:backup_options",
            group=_SERVER,
            examples=("coordinator backup photos.backup",),
        ),
        Command(
            name="restore",
            summary="make a new state directory from a backup",
            options="coordinator.cli.folders:restore_options",
            group=_SERVER,
            examples=("coordinator restore photos.backup --state-dir /srv/fedfit",),
        ),
        Command(
            name="install-service",
            summary="run the coordinator as a systemd service, now and after every start of the machine",
            options="coordinator.cli.server:install_options",
            group=_SERVER,
            examples=("sudo coordinator install-service --advertise 192.168.1.10",),
        ),
        Command(
            name="uninstall-service",
            summary="stop and remove the service; the federation is kept unless --purge is given",
            options="coordinator.cli.server:uninstall_options",
            group=_SERVER,
            examples=("sudo coordinator uninstall-service",),
        ),
        Command(
            name="completion",
            summary="print or install the completion of commands and options for bash, zsh or fish",
            options="coordinator.cli.commands:completion_options",
            group=_SERVER,
            examples=("coordinator completion --install", "coordinator completion zsh"),
        ),
        Command(
            name="complete",
            summary="list what the last word may become; the completion scripts call it",
            options="coordinator.cli.commands:complete_options",
            is_listed=False,
        ),
    ),
)


def completion_options(parser: argparse.ArgumentParser) -> None:
    """`completion`."""
    from edge_client.operate import completion

    completion.add_options(parser, PROGRAM)


def complete_options(parser: argparse.ArgumentParser) -> None:
    """`complete`."""
    from edge_client.operate import completion

    completion.add_words(parser, PROGRAM)


def run(arguments: Sequence[str] | None = None) -> int:
    """Do what was typed; returns the exit code."""
    return command_line.run(PROGRAM, arguments)
