"""What can be found wrong with a run file before a run begins, without torch and without a device."""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.config.run_file import RunFile, check_run_file
from edge_client.errors import InputError, NoSuchNameError
from edge_client.methods import registry as methods
from edge_client.models import registry as models

__all__ = ["check_has_model", "check_run", "guessing_warning", "warnings_of"]

_ENOUGH_SCORES = 5
_ABOVE_CHANCE = 0.05


def check_run(file: RunFile) -> None:
    """Names and options that only the registries know; raises `InputError` before anything begins."""
    check_run_file(file)
    try:
        methods.validate(file.method.name, file.method.parameters)
        for section in filter(
            None, (file.model, *(file.section(architecture) for architecture in methods.architectures(file)))
        ):
            if section.input:  # of a task's data it may be known later
                models.validate(section.name, section.input, section.options)
    except NoSuchNameError as error:
        raise InputError(str(error)) from None
    if file.evaluate.on != "devices" and not methods.has_global_model(file.method.name, file.method.parameters):
        raise InputError(
            f"evaluate.on: the models of {file.method.name!r} live on the devices, the server cannot judge them; "
            'set it to "devices"'
        )


def warnings_of(file: RunFile) -> list[str]:
    """What a run may do, and hardly anybody wants; for people."""
    model = file.model
    if model is None or not models.keeps_statistics(model.name, model.options) or not methods.mixes_widths(file):
        return []
    return [
        "slices of different width share the running statistics of BatchNorms, whose mean fits none of them: narrow "
        "ones may be judged at chance; set track-running-stats = false for the model, as the papers do "
        "(docs/reference/models.md)"
    ]


def guessing_warning(scores: Sequence[float], num_classes: int, metric: str) -> str:
    """A warning if the best of five or more scores is hardly better than guessing; empty if not, or if it is a loss."""
    if metric == "loss" or len(scores) < _ENOUGH_SCORES or not num_classes:
        return ""
    best, chance = max(scores), 1 / num_classes
    if best >= chance + _ABOVE_CHANCE:
        return ""
    return (
        f"{metric} {best:.2f} is close to guessing ({chance:.2f}); see docs/troubleshooting.md, or try: "
        "coordinator run start FILE.toml --set train.normalise=true --set train.lr=0.01"
    )


def check_has_model(file: RunFile, run: str, onnx: str) -> None:
    """Raises `InputError` for a method whose models live on the devices."""
    if not methods.has_global_model(file.method.name, file.method.parameters):
        raise InputError(
            f"the models of {file.method.name!r} live on the devices; type there: "
            f"edge-client export {run} --onnx {onnx}"
        )
