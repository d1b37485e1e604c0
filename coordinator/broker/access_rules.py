"""Configuration lines that let a device connect to an external broker, and use exactly its topics.

mosquitto gets the password as a salted hash in the format of `mosquitto_passwd` (PBKDF2 with SHA-512), a NATS server
gets the password itself.
"""

from __future__ import annotations

import base64
import hashlib
import secrets

from coordinator.broker.broker import DeviceAccess, render_user

__all__ = ["mosquitto_acl", "mosquitto_commands", "mosquitto_password", "nats_user"]

_ITERATIONS = 101  # mosquitto's default; nobody can guess a password of 256 random bits anyway


def mosquitto_password(user: DeviceAccess) -> str:
    """The user's line in mosquitto's `password_file`."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", user.password.encode(), salt, _ITERATIONS)
    fields = ("7", str(_ITERATIONS), *(base64.b64encode(data).decode() for data in (salt, digest)))
    return f"{user.name}:${'$'.join(fields)}"


def mosquitto_acl(user: DeviceAccess) -> str:
    """The user's lines in mosquitto's `acl_file`, without a final line end."""
    write = (f"topic write {topic}" for topic in user.publish)
    read = (f"topic read {topic}" for topic in user.subscribe)
    return "\n".join((f"user {user.name}", *write, *read))


def mosquitto_commands(user: DeviceAccess, *, replace: bool) -> str:
    """Shell commands that add the user to the files `passwords` and `acl`; a replaced user only gets a new password."""
    password = f"echo '{mosquitto_password(user)}' >> passwords"
    if replace:
        return f"sed -i '/^{user.name}:/d' passwords\n{password}"
    return f"{password}\ncat >> acl <<'END'\n{mosquitto_acl(user)}\n\nEND"


def nats_user(user: DeviceAccess) -> str:
    """The user's entry in `authorization.users` of a NATS server's configuration."""
    return render_user(user).strip()
