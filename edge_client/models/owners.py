"""Where a module keeps its tensors: the dictionary and the key behind each name that travels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Owner", "owners_of"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter or buffer, by where it lies."""

    name: str  # in the whole model
    part: nn.Module
    tensors: dict[str, Tensor | None]  # of the module that has it
    key: str

    @property
    def value(self) -> Tensor:
        """As it is now."""
        value = self.tensors[self.key]
        assert value is not None
        return value

    def put(self, value: Tensor) -> None:
        """Another tensor in its place."""
        self.tensors[self.key] = value


def owners_of(module: nn.Module, prefix: str = "") -> Iterator[Owner]:
    """The parameters and buffers of a module; without buffers that do not travel."""
    for path, part in module.named_modules(prefix=prefix):
        dot = f"{path}." if path else ""
        parameters: dict[str, Tensor | None] = part._parameters
        yield from (
            Owner(f"{dot}{key}", part, parameters, key) for key, tensor in parameters.items() if tensor is not None
        )
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield Owner(f"{dot}{key}", part, part._buffers, key)
