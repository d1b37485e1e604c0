"""What a device's owner can do, by the code of a reason. No I/O."""

from __future__ import annotations

__all__ = ["is_failure", "is_of_the_run", "mend_of", "sentence", "text_of"]

# code -> what happened, where the device sent no details, and what to do
_REASONS: dict[str, tuple[str, str]] = {
    "nothing_fits": (
        "No training plan fits into its memory budget.",
        "Raise limits.memory in its device.toml, or offer smaller models in the run file: "
        'slices = ["full", "width:1/2"]',
    ),
    "over_budget": (
        "Training took more memory than its budget, and was stopped.",
        "The device chooses a smaller plan next time. If it happens again, raise limits.memory in its device.toml.",
    ),
    "low_memory": (
        "Other programs use the memory that training needs.",
        "It is asked again in the next round. Stop what else uses memory there, or lower limits.memory.",
    ),
    "no_data": (
        "No training data is configured.",
        "On the device, run: edge-client join --data DIR, or name the data in its device.toml.",
    ),
    "bad_data": ("Its data cannot be read.", "On the device, run: edge-client doctor; it names the file."),
    "unknown_class": (
        "Its data has a class that the run does not know.",
        "Add the class to classes in the run file, or remove its folder on the device.",
    ),
    "task_missing": (
        "Its owner has not allowed the task of this run.",
        "Copy the task's file to the device, and name it below tasks in its device.toml.",
    ),
    "task_differs": (
        "Its copy of the task is not that of the run.",
        "Copy the same task file to the device and to the server.",
    ),
    "bad_task": (
        "The task's code failed there.",
        "Look at its log lines below; try the task with coordinator simulate.",
    ),
    "bad_model": ("The model cannot be built there.", "On the device, run: edge-client doctor; compare the versions."),
    "disk_full": ("Its disk is full.", "Make space below its state directory; it continues by itself."),
    "worker_died": ("The training process ended without a result.", "It is asked again. Look at its log lines below."),
    "timeout": ("It was not done when the round ended.", "It is asked again in the next round."),
    "expired": ("It was not done when the round ended.", "It is asked again in the next round."),
    "suspended": (
        "It sends many useless messages, which are ignored for a while.",
        "Look at its log; is it a client of this federation?",
    ),
    "offline": (
        "Not connected.",
        "On the device, run: edge-client doctor",
    ),
    "not_seen": (
        "Not connected since the coordinator was started.",
        "Is it switched on? On the device, run: edge-client doctor",
    ),
}
_FAILURES = ("unknown_class", "bad_data", "bad_task", "bad_model", "bad_method", "unknown_model", "unknown_method")


def text_of(code: str) -> str:
    """What happened, if the device did not describe it."""
    return _REASONS[code][0] if code in _REASONS else f"It reports: {code.replace('_', ' ')}."


def sentence(detail: str) -> str:
    """What a device wrote, as a sentence."""
    return f"{detail[:1].upper()}{detail[1:]}{'' if detail.endswith(('.', '!', '?')) else '.'}"


def mend_of(code: str) -> str:
    """What to do about it."""
    return _REASONS[code][1] if code in _REASONS else "On the device, run: edge-client doctor"


def is_failure(code: str) -> bool:
    """Whether somebody made a mistake that stays until it is corrected."""
    return code in _FAILURES or code == "suspended"


def is_of_the_run(code: str) -> bool:
    """Whether the run just does not want the device: nothing is wrong."""
    return code == "label"
