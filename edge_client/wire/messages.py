"""The control messages, and how they are sealed: each has a proven sender, receiver, session and number.

Every message travels as {session, seq, body} in an authenticated frame. A session begins when the coordinator answers a
device's hello; its id is the coordinator's random choice, so that nothing recorded in an earlier session is valid in
it. Within a session each side counts its messages, and the other takes each number once (`ReplayWindow`).

    device -> coordinator      Hello Heartbeat Accept Decline Pull Offer Goodbye Deployed
    coordinator -> device      Welcome Refuse Assign Cancel Grant Receipt Share Deploy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from edge_client.errors import PayloadError
from edge_client.records import (
    Between,
    Count,
    DeviceProfile,
    Hash,
    Id,
    Matches,
    PartRef,
    Positive,
    SliceText,
    Text,
    TrainingPlan,
    from_map,
    to_map,
)
from edge_client.wire import frames

__all__ = [
    "MAX_DEPLOYED_BYTES",
    "Accept",
    "Assign",
    "Cancel",
    "Decline",
    "Deploy",
    "Deployed",
    "Goodbye",
    "Grant",
    "Heartbeat",
    "Hello",
    "Message",
    "Offer",
    "Pull",
    "Receipt",
    "Refuse",
    "ReplayWindow",
    "Sealed",
    "Share",
    "Welcome",
    "context_down",
    "context_up",
    "open_message",
    "seal_message",
]

Code = Annotated[str, Matches(r"[a-z0-9_]{1,32}")]  # a reason that programs may compare
Ranges = tuple[tuple[Count, Count], ...]
MAX_DEPLOYED_BYTES = 2**32  # of an ONNX file; larger ones would need files beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first word after every connect; idempotent. `held` is the lease that the device has in hand, if any."""

    boot: Id
    hello: Count  # counts this boot's hellos
    protocol: tuple[Count, Count] = (frames.VERSION, frames.VERSION)
    client: Annotated[str, Matches(r"(?s).{0,64}")] = ""
    profile: DeviceProfile
    labels: dict[str, Text]
    tasks: dict[str, Hash] = field(default_factory=dict)  # what the owner allows: name -> hash of its file
    free_bytes: Count
    held: Id | None = None
    finished: bool = False  # the held lease is trained and waits for its receipt
    deploys: bool = False  # understands `Deploy`; clients of earlier versions do not say it, and are never sent one


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The device is connected; what it does at the moment."""

    state: Code
    lease: Id | None = None
    phase: Annotated[str, Matches(r"[a-z_]{0,16}")] = ""
    step: Count = 0
    total: Count = 0
    loss: float | None = None
    free_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The device has stored the assignment and will carry it out."""

    lease: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """The assignment will not be done, or its worker failed for good; `log` only where the owner allows it."""

    lease: Id
    code: Code
    detail: Text = ""
    log: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Asks for these chunks of a blob, if any, and says whether the device listens on the shared topic."""

    sha256: Hash
    ranges: Ranges
    heard: Count | None = None  # None: does not listen there; else 1 + the index of the last chunk heard, or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A finished update: its hash and size. Repeated until a receipt comes."""

    lease: Id
    run: Id
    round: Count
    sha256: Hash
    length: Count
    num_samples: int  # checked at intake, where a lie gets its own answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The device leaves on purpose."""

    reason: Code = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The state of a deployment on this device; sent at every change, on request, and after every welcome."""

    deployment: Id
    state: Annotated[str, Matches(r"fetching|testing|active|refused|rolled_back")]
    code: Code = "ok"
    detail: Text = ""  # one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to the hello with number `hello` of this boot: the session begins."""

    boot: Id
    hello: Count
    session: Id
    epoch: Count
    heartbeat_s: Annotated[float, Between(0.1, 3600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The coordinator refuses the device, and why; the device says hello again after `retry_s`."""

    boot: Id
    code: Code
    detail: Text = ""
    retry_s: Annotated[float, Between(0, 86400)] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Work for a device. Devices take only what is newer than all they have seen: (epoch, issue) grows.

    Neither `train` nor `evaluate`: only the plan is asked for (a dry run), and no model is sent.
    """

    lease: Id
    epoch: Count
    issue: Count
    run: Id
    round: Count
    num_rounds: Count
    version: Count
    train: bool
    evaluate: bool
    seed: Annotated[int, Between(0, 2**63 - 1)]
    learning_rate: float
    threads: Annotated[int, Between(1, 1024)] = 1
    slice: SliceText = "full"  # of the run's model: what this device trains
    plan: TrainingPlan | None = None
    counted: Id | None = None  # this device's last lease that went into a model of this run: its method's state counts
    deadline_s: float
    parts: tuple[PartRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Cancels an assignment or a deployment, which the device forgets."""

    lease: Id
    code: Code = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Allows the device to send these chunks of its update."""

    lease: Id
    sha256: Hash
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The update is stored for good (accepted), or never will be (late, refused); the device may delete it."""

    lease: Id
    sha256: Hash
    status: Annotated[str, Matches(r"accepted|late|refused")]
    code: Code = "ok"
    detail: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Asks the device to listen on the shared topic for a blob, or to stop; its next `Pull` confirms that."""

    sha256: Hash
    listen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Use this ONNX file from now on, if it passes its test; repeated until `Deployed` tells what became of it.

    What the file must say of itself is in here, so that one with other classes is no surprise to whoever uses it.
    """

    deployment: Id
    run: Id
    version: Count
    architecture: SliceText = "full"
    precision: Annotated[str, Matches(r"fp32|int8")] = "fp32"
    input: tuple[Positive, ...]  # shape of one sample
    classes_sha256: Hash  # of the names in their order: `onnx.file.classes_hash`
    sha256: Hash
    length: Annotated[int, Between(1, MAX_DEPLOYED_BYTES)]


Message: TypeAlias = (
    Hello
    | Heartbeat
    | Accept
    | Decline
    | Pull
    | Offer
    | Goodbye
    | Deployed
    | Welcome
    | Refuse
    | Assign
    | Cancel
    | Grant
    | Receipt
    | Share
    | Deploy
)

_KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: Heartbeat,
    3: Accept,
    4: Decline,
    5: Pull,
    6: Offer,
    7: Goodbye,
    8: Deployed,
    33: Welcome,
    34: Refuse,
    35: Assign,
    36: Cancel,
    37: Grant,
    38: Receipt,
    39: Share,
    40: Deploy,
}
_NUMBERS = {cls: number for number, cls in _KINDS.items()}
_FIRST_DOWN = 32  # kinds above travel from the coordinator to a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A message whose sender is proven."""

    session: str
    seq: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    session: Annotated[str, Matches(r"[A-Za-z0-9_-]{0,64}")]
    seq: Count
    body: dict[str, Any]


def context_up(federation: str, device: str) -> str:
    """What the HMAC of a device's messages covers beside the frame."""
    return f"{federation}/{device}/up"


def context_down(federation: str, device: str) -> str:
    """What the HMAC of messages to a device covers beside the frame."""
    return f"{federation}/{device}/down"


def seal_message(message: Message, *, session: str, seq: int, key: bytes, context: str) -> bytes:
    """The bytes of a message."""
    body = {"session": session, "seq": seq, "body": to_map(message)}
    return frames.seal(_NUMBERS[type(message)], body, key=key, context=context)


def open_message(data: bytes, *, key: bytes, context: str) -> Sealed:
    """The message and its place in the session; raises `PayloadError` whatever came."""
    frame = frames.open_frame(data, key=key, context=context)
    cls = _KINDS.get(frame.kind)
    if cls is None or (frame.kind > _FIRST_DOWN) != context.endswith("/down"):
        raise PayloadError("kind", f"no message of kind {frame.kind} travels this way")
    outer = from_map(_Body, frame.body, where="envelope")
    return Sealed(session=outer.session, seq=outer.seq, message=from_map(cls, outer.body))


class ReplayWindow:
    """Takes each number of a session once, in nearly any order: the last 256 are remembered, older ones are refused."""

    __slots__ = ("_highest", "_seen")
    _SIZE = 256

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0

    def take(self, seq: int) -> bool:
        """Whether `seq` is new."""
        if seq > self._highest:
            ahead = min(seq - self._highest, self._SIZE)
            self._seen = ((self._seen << ahead) | 1) & ((1 << self._SIZE) - 1)
            self._highest = seq
            return True
        age = self._highest - seq
        if age >= self._SIZE or self._seen >> age & 1:
            return False
        self._seen |= 1 << age
        return True
