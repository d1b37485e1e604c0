"""The options of `edge-client plan` and `bench` that name what is trained; free of torch, as every start reads them."""

from __future__ import annotations

import argparse

__all__ = ["add_subject"]


def add_subject(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """What is trained; `many`: patterns of models are allowed."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="NAME", help="a built-in model: coordinator models list; or timm:NAME, torchvision:NAME"
    )
    if many:
        what.add_argument(
            "--models", metavar="PATTERN,...", help="a table of all that match: 'timm:mobilenet*,timm:efficientnet*'"
        )
    what.add_argument("--task", metavar="FILE:OBJ", help="a model of your own: defects.py:task")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x96x96")
    parser.add_argument("--classes", metavar="N", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch", metavar="B", type=int, default=32, help="samples per step; default: %(default)s")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="default: %(default)s")
    parser.add_argument("--momentum", metavar="M", type=float, default=0.9, help="of sgd; default: %(default)s")
    parser.add_argument("--method", metavar="NAME", default="fedavg", help="default: %(default)s")
    parser.add_argument("--slices", metavar="LIST", help="parts of the model to choose from: full,width:1/2,...")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="an option of the model or of the method"
    )
