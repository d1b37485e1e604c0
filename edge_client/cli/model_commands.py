"""The commands that measure this device, plan training on it, and use models: profile, plan, bench, infer, export."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edge_client.config.device_file import load_device_file
from edge_client.errors import InputError
from edge_client.measuring import plan_options
from edge_client.operate.output_format import add_format
from edge_client.operate.service_commands import add_config, add_state_dir

__all__ = [
    "bench_options",
    "export_options",
    "infer_options",
    "planning_options",
    "profile_options",
    "prove_options",
]


def profile_options(profile: argparse.ArgumentParser) -> None:
    """Add the options of `profile`."""
    other = profile.add_mutually_exclusive_group()
    other.add_argument("--root", metavar="DIR", type=Path, help="a copy of another system's /proc, /sys and /etc")
    other.add_argument("--profile", metavar="NAME", help="a device that is not at hand: a known model, or a TOML file")
    add_format(profile)
    add_config(profile)
    add_state_dir(profile)
    profile.set_defaults(do=_profile)


def planning_options(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    plan_options.add_subject(plan, many=True)
    budget = plan.add_mutually_exclusive_group()
    budget.add_argument("--budget", metavar="SIZE", help="of the whole worker process; default: what this device has")
    budget.add_argument("--training-budget", metavar="SIZE", help="of what training adds to a warmed-up worker")
    budget.add_argument("--profile", metavar="NAME", help="a device that is not at hand: edge-client profile --profile")
    add_format(plan)
    plan.set_defaults(do=_plan)


def bench_options(bench: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    plan_options.add_subject(bench)
    bench.add_argument(
        "--budgets", metavar="SIZE,...", help="of what training adds to a worker; default: halves down to the smallest"
    )
    bench.add_argument("--out", metavar="DIR", type=Path, help="for bench.json and bench.png; default: bench-MODEL")
    add_format(bench)
    bench.set_defaults(do=_bench)


def prove_options(prove: argparse.ArgumentParser) -> None:
    """Add the options of `prove`."""
    prove.add_argument("--task", metavar="FILE:OBJ", help="prove a model of your own instead of many: defects.py:task")
    prove.add_argument("--input", metavar="SHAPE", help="shape of one sample, if the task does not tell")
    prove.add_argument("--count", metavar="N", type=int, default=100, help="cases; default: %(default)s")
    prove.add_argument("--minutes", metavar="M", type=float, help="begin no case after so many minutes")
    prove.add_argument("--seed", metavar="N", type=int, default=1, help="of the cases; default: %(default)s")
    prove.add_argument("--out", metavar="DIR", type=Path, help="for prove.json and prove.png; default: neither")
    add_format(prove)
    prove.set_defaults(do=_prove)


def infer_options(infer: argparse.ArgumentParser) -> None:
    """Add the options of `infer`."""
    infer.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help="single images, with an exported model")
    what = infer.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="FILE.onnx|NAME", help="an exported model; or a built-in one: coordinator models list"
    )
    what.add_argument("--task", metavar="FILE:OBJ", help="a model of your own: defects.py:task")
    what.add_argument("--deployed", action="store_true", help="the model that the coordinator put on this device")
    infer.add_argument(
        "--run-model", metavar="FILE", type=Path, help="weights, unless ONNX: a model.bin, or a run's directory"
    )
    infer.add_argument(
        "--data", metavar="SOURCE:PATH", help="digits, npz:/data/a.npz, ...; with ONNX also a path alone"
    )
    infer.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x96x96; default: the data's")
    infer.add_argument("--classes", metavar="N", type=int, help="that the model tells apart; default: the data's")
    infer.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="an option of the model")
    infer.add_argument(
        "--batch",
        metavar="B",
        type=int,
        help="samples at a time; part of the result where BatchNorms keep no statistics; default: 32, of ONNX 1",
    )
    infer.add_argument("--depthwise", action="store_true", help="unit by unit, with activations on disk")
    infer.add_argument("--budget", metavar="SIZE", help="that this may take; with it, groups are as large as fits")
    infer.add_argument("--threads", metavar="N", type=int, default=1, help="default: %(default)s")
    infer.add_argument("--out", metavar="FILE", type=Path, help="for the predictions: .csv or .npz")
    add_format(infer)
    add_state_dir(infer)
    infer.set_defaults(do=_infer, optimizer="sgd", momentum=0.0, method="fedavg", slices=None)


def export_options(export: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    export.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    export.add_argument("--onnx", metavar="FILE", type=Path, required=True, help="the file to write; ends with .onnx")
    export.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x96x96, if the task does not tell")
    add_config(export)
    add_format(export)
    add_state_dir(export)
    export.set_defaults(do=_export)


def _profile(options: argparse.Namespace) -> None:
    from edge_client.device import report  # a daemon need not hold it

    limit = _memory_limit(options)
    if options.profile is not None:
        device_report = report.report_known_model(options.profile, limit)
    else:
        device_report = report.report_system(Path("/") if options.root is None else options.root, limit)
    print(
        json.dumps(report.to_json(device_report), indent=1)
        if options.format == "json"
        else report.describe(device_report)
    )


def _plan(options: argparse.Namespace) -> None:
    from edge_client.measuring import plan_from_options  # loads torch

    if options.models is not None:
        _plan_many(options)
        return
    what, choice = plan_from_options.find_plan(options)
    if options.format == "json":
        print(json.dumps(plan_from_options.to_json(choice), indent=1))
    else:
        print(plan_from_options.describe(what, choice))


def _plan_many(options: argparse.Namespace) -> None:
    from edge_client.measuring import plan_many  # loads torch

    rows = plan_many.plan_all(options)
    if options.format == "json":
        print(json.dumps(list(rows), indent=1))
        return
    width = 40
    print(f"{'model':<{width}}  fits  {'training':>9}  {'time':>5}  plan")
    for row in rows:
        print(plan_many.describe(row, width), flush=True)


def _bench(options: argparse.Namespace) -> None:
    from edge_client.cli import bench_command  # loads torch

    bench = bench_command.run(options)
    messages = bench_command.write(bench, options.out or Path(f"bench-{bench.what.run.what.replace(' ', '-')}"))
    if options.format == "json":
        print(json.dumps(bench_command.to_json(bench), indent=1))
    else:
        print(bench_command.describe(bench))
    print("\n".join(messages), file=sys.stderr)


def _prove(options: argparse.Namespace) -> None:
    from edge_client.cli import prove_command  # loads torch

    proof = prove_command.run(options)
    messages = prove_command.write(proof, options.out) if options.out is not None else []
    if options.format == "json":
        print(json.dumps(prove_command.to_json(proof), indent=1))
    else:
        print(prove_command.describe(proof))
    print("\n".join(messages), file=sys.stderr)
    prove_command.check(proof)


def _infer(options: argparse.Namespace) -> None:
    if options.deployed:
        from edge_client.client import deployed

        options.model = str(deployed.model_path(options.state_dir))
    is_onnx = options.model is not None and options.model.lower().endswith(".onnx")
    _check_samples(options, is_onnx=is_onnx)
    if options.images:
        from edge_client.onnx import infer_images  # without torch

        answers = infer_images.answer_images(Path(options.model), options.images, threads=options.threads)
        print(
            json.dumps(infer_images.to_json(answers), indent=1)
            if options.format == "json"
            else infer_images.describe(answers)
        )
        return
    if is_onnx:
        from edge_client.onnx import infer as onnx_infer  # without torch

        predicted = onnx_infer.run(options)
        if options.format == "json":
            print(json.dumps(onnx_infer.to_json(predicted), indent=1))
        else:
            print(onnx_infer.describe(predicted))
        return
    from edge_client.cli import infer_command  # loads torch

    answer = infer_command.run(options)
    if options.format == "json":
        print(json.dumps(infer_command.to_json(answer), indent=1))
    else:
        print(infer_command.describe(answer))


def _check_samples(options: argparse.Namespace, *, is_onnx: bool) -> None:
    """Single images or a data set, not both, and images only for a model that brings its weights and classes."""
    if bool(options.images) == (options.data is not None):
        came = "both" if options.images else "neither"
        raise InputError(f"expected images, such as cat.png, or --data SOURCE:PATH, got {came}")
    if options.images and not is_onnx:
        raise InputError("single images need an exported model: --model FILE.onnx, or --deployed")
    if options.images and options.out is not None:
        raise InputError("--out: with --data only; for single images take --format json")


def _export(options: argparse.Namespace) -> None:
    from edge_client.cli import personal_export as personal  # loads torch

    facts = personal.export(options)
    print(json.dumps(facts, indent=1) if options.format == "json" else personal.describe(facts))


def _memory_limit(options: argparse.Namespace) -> int | None:
    """The memory limit of this device's file, which does not apply to another device's profile unless it is named."""
    path: Path = options.config or options.state_dir / "device.toml"
    if options.config is None:
        if options.root is not None or options.profile is not None:
            return None
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
    return load_device_file(path).limits.memory
