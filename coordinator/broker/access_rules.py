"""The lines by which somebody else's broker lets a device in: its user, and exactly its topics.

For mosquitto the password travels as a salted hash, in the form of `mosquitto_passwd` (PBKDF2 with SHA-512); a NATS
server takes the password itself.
"""

from __future__ import annotations

import base64
import hashlib
import secrets

from coordinator.broker.broker import DeviceAccess, render_user

__all__ = ["mosquitto_acl", "mosquitto_commands", "mosquitto_password", "nats_user"]

_ITERATIONS = 101  # mosquitto's own; the password has 256 random bits, so that nobody guesses it anyway


def mosquitto_password(user: DeviceAccess) -> str:
    """A line of mosquitto's `password_file`."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", user.password.encode(), salt, _ITERATIONS)
    words = ("7", str(_ITERATIONS), *(base64.b64encode(data).decode() for data in (salt, digest)))
    return f"{user.name}:${'$'.join(words)}"


def mosquitto_acl(user: DeviceAccess) -> str:
    """Lines of mosquitto's `acl_file`; no final line end."""
    write = (f"topic write {topic}" for topic in user.publish)
    read = (f"topic read {topic}" for topic in user.subscribe)
    return "\n".join((f"user {user.name}", *write, *read))


def mosquitto_commands(user: DeviceAccess, *, replace: bool) -> str:
    """Shell commands for the files `passwords` and `acl`; one that is replaced has its topics already."""
    password = f"echo '{mosquitto_password(user)}' >> passwords"
    if replace:
        return f"sed -i '/^{user.name}:/d' passwords\n{password}"
    return f"{password}\ncat >> acl <<'END'\n{mosquitto_acl(user)}\n\nEND"


def nats_user(user: DeviceAccess) -> str:
    """An entry of `authorization.users` in a NATS server's configuration."""
    return render_user(user).strip()
