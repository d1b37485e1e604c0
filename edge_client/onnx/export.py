"""Exports a trained model as an ONNX file whose outputs equal those of torch.

Covers: writing the graph, the checks (onnx's own where it is installed; torch's answers against onnxruntime's on random
samples in batches of several sizes), int8. Does not cover: where weights come from.

The graph is made by torch's exporter over TorchScript: it follows any module, takes half a second, and needs nothing
beside torch. Its successor would need onnxscript and torch's compiler. Files of both can be read by `onnx.file`.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from edge_client import durable
from edge_client.errors import InputError, MachineError
from edge_client.onnx import test_samples
from edge_client.onnx.file import INPUT, OUTPUT, Facts, OnnxModel, add_facts, runtime

__all__ = ["LIMIT", "Predicting", "Predictor", "Written", "has_batch_statistics", "quantize", "write_onnx"]

LIMIT = 1e-4  # of the difference, in parts of the largest output or of 1
_OPSET = 17  # first with LayerNormalization; onnxruntime has it since 1.12
_TRACED_BATCH = 2
_COMPARED_BATCHES = (1, 3)
_QUANTIZED = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How an exported file compares with torch."""

    max_difference: float  # between torch's outputs and onnxruntime's
    largest_output: float
    facts: Facts
    checked: bool  # by onnx's checker, too

    @property
    def relative_difference(self) -> float:
        """What is compared with `LIMIT`: float32 has 7 digits, whatever stands before the point."""
        return self.max_difference / max(1.0, self.largest_output)


def write_onnx(model: nn.Module, facts: Facts, out: Path) -> Written:
    """Write `out` and compare its outputs with torch's; raises `InputError` and leaves no file if they differ.

    The model is put into evaluation mode, and its BatchNorms without statistics are replaced.
    """
    runtime()
    model.eval().requires_grad_(False)
    facts = replace(facts, batch_statistics=has_batch_statistics(model))
    sizes = _COMPARED_BATCHES if not facts.batch_statistics else [size + 2 for size in _COMPARED_BATCHES]
    samples = [torch.from_numpy(test_samples.samples(facts.input)), *(_random(size, facts.input) for size in sizes)]
    with torch.no_grad():
        expected = [model(x) for x in samples]
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with durable.disk_errors(f"cannot write {out}"):
            _write_graph(_plain(model), facts.input, temporary)
            checked = _check(temporary)
            add_facts(temporary, facts)
            test_samples.add(temporary, expected[0].numpy())
        outputs = [torch.from_numpy(OnnxModel(temporary).run(x.numpy())) for x in samples]
        written = Written(
            max_difference=max(float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True)),
            largest_output=max(float(b.abs().max()) for b in expected),
            facts=facts,
            checked=checked,
        )
        if not written.relative_difference <= LIMIT:  # also if it is not a number
            raise InputError(
                f"{out} would not say the same as torch: they differ by {written.max_difference:.3g} in outputs up to "
                f"{written.largest_output:.3g}, at most {LIMIT:g} of that is accepted; nothing was written"
            )
        with durable.disk_errors(f"cannot write {out}"):
            durable.publish(temporary, out, point="onnx")
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _random(size: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(size))


def _write_graph(model: nn.Module, shape: Sequence[int], out: Path) -> None:
    # the choice between exporters has a name since torch 2.5; before there was this one only
    exporter: dict[str, Any] = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    names: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT]}
    batch = {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}}
    with warnings.catch_warnings(), _no_logs("torch.onnx"):
        warnings.simplefilter("ignore")  # the exporter's age; what a trace may miss is seen in the comparison
        try:
            torch.onnx.export(
                model,
                (_random(_TRACED_BATCH, shape),),
                str(out),
                dynamic_axes=batch,
                opset_version=_OPSET,
                **names,
                **exporter,
            )
        except RuntimeError as error:  # the exporter's own, and what a module raises while it is traced
            detail = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise InputError(f"the model cannot be written as ONNX: {detail}") from error


def _check(path: Path) -> bool:
    """Ask onnx itself; devices have onnxruntime alone, which checks what it loads."""
    try:
        import onnx
    except ImportError:
        return False
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        detail = str(error).strip().splitlines()[0][:300]
        raise InputError(f"torch wrote a graph that onnx does not accept: {detail}") from error
    return True


class Predictor(Protocol):
    """The part of `methods.base.Client` that predicts; that class is in a theme above this one."""

    def modules(self) -> Mapping[str, nn.Module]:
        """What it uses beside the model."""

    def predict(self, x: Tensor) -> Tensor:
        """Its logits."""


class Predicting(nn.Module):
    """A method's predictions, which may use several models, as one module."""

    def __init__(self, model: nn.Module, client: Predictor) -> None:
        super().__init__()
        self.model = model
        self.others = nn.ModuleDict(client.modules())
        self._client = client

    def forward(self, x: Tensor) -> Tensor:
        return self._client.predict(x)


# BatchNorms without statistics of their own


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether an output depends on the other samples of its batch."""
    return any(_uses_batch(part) for part in model.modules())


def _uses_batch(part: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None


def _plain(model: nn.Module) -> nn.Module:
    """ONNX runtimes normalise with stored statistics only: those of a batch are spelled out."""
    if _uses_batch(model):
        return _BatchStatistics(model)
    for name, part in model.named_children():
        setattr(model, name, _plain(part))
    return model


class _BatchStatistics(nn.Module):
    """A BatchNorm that uses the mean and the variance of its input, in operations that every runtime has."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.affine, self.eps = norm.affine, norm.eps
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        axes = [0, *range(2, x.dim())]
        centred = x - x.mean(axes, keepdim=True)
        scaled = centred / ((centred * centred).mean(axes, keepdim=True) + self.eps).sqrt()
        if not self.affine:
            return scaled
        shape = [-1, *[1] * (x.dim() - 2)]
        return scaled * self.weight.reshape(shape) + self.bias.reshape(shape)


# int8


def quantize(source: Path, facts: Facts, out: Path) -> Facts:
    """Weights as bytes, activations as bytes with a scale for each batch: a quarter of the size, no data needed."""
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise MachineError(f"--int8 needs the package onnx ({error}); pip install 'fedfit[coordinator]'") from error
    temporary = out.with_name(f".{out.name}.tmp")
    facts = replace(facts, precision="int8")
    try:
        with durable.disk_errors(f"cannot write {out}"), _no_logs(""):
            quantize_dynamic(
                source,
                temporary,
                op_types_to_quantize=list(_QUANTIZED),
                per_channel=True,
                weight_type=QuantType.QUInt8,  # signed ones overflow on processors without VNNI
                extra_options={"MatMulConstBOnly": True},
            )
            _replace_facts(temporary, facts)
            test_samples.add(temporary, OnnxModel(temporary).run(test_samples.samples(facts.input)))
            durable.publish(temporary, out, point="onnx.int8")
    finally:
        temporary.unlink(missing_ok=True)
    return facts


def _replace_facts(path: Path, facts: Facts) -> None:
    import onnx

    model = onnx.load(str(path))
    del model.metadata_props[:]
    onnx.save(model, str(path))
    add_facts(path, facts)


@contextmanager
def _no_logs(name: str) -> Iterator[None]:
    """The libraries' advice to those who write programs is none for those who type commands."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
