"""The training budgets of a simulation's virtual devices, as its run file lists them."""

from __future__ import annotations

from edge_client.config.quantities import parse_bytes
from edge_client.config.run_file import RunFile, SimulateSection
from edge_client.errors import InputError

__all__ = ["budgets_by_name", "budgets_of"]


def budgets_by_name(file: RunFile) -> dict[str, int | None]:
    """The virtual devices and their budgets for training, in the coordinator's order."""
    budgets = budgets_of(file.simulate or SimulateSection())
    width = max(4, len(str(len(budgets))))
    return {f"d{number:0{width}}": budget for number, budget in enumerate(budgets, start=1)}


def budgets_of(section: SimulateSection) -> tuple[int | None, ...]:
    """The budget of each device: the listed ones in turn, or `*N` of each; None: no limit."""
    texts = section.training_budgets
    if not texts:
        return (None,) * section.devices
    pieces = [text.partition("*") for text in texts]
    try:
        sizes = [parse_bytes(size) for size, _, _ in pieces]
    except InputError as error:
        raise InputError(f"simulate.training-budgets: {error}") from None
    if not any(star for _, star, _ in pieces):
        return tuple(sizes[i % len(sizes)] for i in range(section.devices))
    budgets = [size for size, (_, _, count) in zip(sizes, pieces, strict=True) for _ in range(int(count or 1))]
    if len(budgets) != section.devices:
        raise InputError(
            f"simulate.training-budgets: {', '.join(texts)} are {len(budgets)} budgets for {section.devices} devices; "
            "make them as many, or leave out the *N to take turns"
        )
    return tuple(budgets)
