"""The table of `edge-client`'s commands: what its help page lists, in this order, and where each command is defined."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from edge_client.operate import command_line
from edge_client.operate.command_line import Command

__all__ = ["PROGRAM", "complete_options", "completion_options", "run"]

_EVERYDAY = "Everyday commands"
_MEMORY = "Memory: what fits on this device"
_MODELS = "Trained models"
_DEVICE = "Look after this device"

PROGRAM = Command(
    name="edge-client",
    summary="take part in a federation, within this device's limits",
    examples=("edge-client join kitchen.join --data /data/photos", "edge-client start"),
    commands=(
        Command(
            name="join",
            summary="make this device a member of a federation, once",
            options="edge_client.cli.membership:join_options",
            group=_EVERYDAY,
            examples=(
                "edge-client join kitchen.join --data /data/photos",
                "edge-client join - --no-check < kitchen.join",
            ),
        ),
        Command(
            name="start",
            summary="run the client until it is stopped",
            options="edge_client.cli.membership:start_options",
            group=_EVERYDAY,
            examples=("edge-client start", "edge-client start --join kitchen.join --state-dir kitchen"),
        ),
        Command(
            name="status",
            summary="show what this device is and what its client is doing",
            options="edge_client.cli.membership:status_options",
            group=_EVERYDAY,
            examples=("edge-client status", "edge-client status --format json"),
        ),
        Command(
            name="config",
            summary="check device.toml and show it with all defaults",
            options="edge_client.cli.membership:config_options",
            group=_EVERYDAY,
            examples=("edge-client config", "edge-client config --config device.toml --format json"),
        ),
        Command(
            name="profile",
            summary="show this device's hardware, how much memory training may use, and why",
            options="edge_client.cli.model_commands:profile_options",
            group=_MEMORY,
            examples=("edge-client profile", "edge-client profile --profile raspberry-pi-4-2gb"),
        ),
        Command(
            name="plan",
            summary="show how a model would be trained within a memory budget",
            options="edge_client.cli.model_commands:planning_options",
            group=_MEMORY,
            examples=(
                "edge-client plan --model resnet18 --input 3x96x96 --budget 600MB",
                "edge-client plan --model resnet18 --profile raspberry-pi-4-2gb",
            ),
        ),
        Command(
            name="bench",
            summary="measure the memory and time that plans for several budgets take on this device",
            options="edge_client.cli.model_commands:bench_options",
            group=_MEMORY,
            examples=(
                "edge-client bench --model small-cnn --input 3x96x96",
                "edge-client bench --model small-cnn --budgets 20MB,60MB",
            ),
        ),
        Command(
            name="prove",
            summary="prove that training stays inside predictions and budgets here: random models, measured",
            options="edge_client.cli.model_commands:prove_options",
            group=_MEMORY,
            examples=("edge-client prove --minutes 10", "edge-client prove --task defects.py:task --count 20"),
        ),
        Command(
            name="infer",
            summary="run a trained model on your data",
            options="edge_client.cli.model_commands:infer_options",
            group=_MODELS,
            examples=(
                "edge-client infer --model photos.onnx cat.png",
                "edge-client infer --model photos.onnx --data image-folder:/data/photos",
                "edge-client infer --deployed --data npz:/data/new.npz --out predictions.csv",
            ),
        ),
        Command(
            name="export",
            summary="write this device's own model of a run as an ONNX file",
            options="edge_client.cli.model_commands:export_options",
            group=_MODELS,
            examples=("edge-client export latest --onnx mine.onnx",),
        ),
        Command(
            name="doctor",
            summary="check this device, and suggest a fix for each check that fails",
            options="edge_client.operate.service_commands:doctor_options",
            group=_DEVICE,
            examples=("edge-client doctor", "sudo edge-client doctor --as-service"),
        ),
        Command(
            name="install-service",
            summary="run the client as a systemd service, now and after every start of the machine",
            options="edge_client.operate.service_commands:install_options",
            group=_DEVICE,
            examples=("sudo edge-client install-service", "edge-client install-service --dry-run"),
        ),
        Command(
            name="uninstall-service",
            summary="stop and remove the service; the device stays a member unless --purge is given",
            options="edge_client.operate.service_commands:uninstall_options",
            group=_DEVICE,
            examples=("sudo edge-client uninstall-service",),
        ),
        Command(
            name="leave",
            summary="end this device's membership; device.toml is kept",
            options="edge_client.cli.membership:leave_options",
            group=_DEVICE,
            examples=("edge-client leave",),
        ),
        Command(
            name="completion",
            summary="print or install the completion of commands and options for bash, zsh or fish",
            options="edge_client.cli.commands:completion_options",
            group=_DEVICE,
            examples=("edge-client completion --install", "edge-client completion zsh"),
        ),
        Command(
            name="complete",
            summary="list what the last word may become; the completion scripts call it",
            options="edge_client.cli.commands:complete_options",
            is_listed=False,
        ),
    ),
)


def completion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `completion`."""
    from edge_client.operate import completion

    completion.add_options(parser, PROGRAM)


def complete_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `complete`."""
    from edge_client.operate import completion

    completion.add_words(parser, PROGRAM)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; returns the exit code."""
    return command_line.run(PROGRAM, arguments)
