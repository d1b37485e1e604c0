"""Why a broker's certificate was not accepted, and what to do about it, in one line."""

from __future__ import annotations

import ssl

__all__ = ["explain"]

# OpenSSL's X509_V_ERR_*
_OTHER_NAME = frozenset({62, 64})  # host name, IP address
_OTHER_TIME = frozenset({9, 10})  # not yet valid, expired
_OTHER_AUTHORITY = frozenset({2, 7, 18, 19, 20, 21, 24, 26, 30})  # unknown, another's signature, no authority at all


def explain(error: ssl.SSLCertVerificationError, *, where: str, host: str) -> str:
    """`where` is host and port as people read them, `host` the name that was asked for."""
    problem = f"the certificate of {where} is not acceptable: {error.verify_message}"
    return f"{problem}; {_advice(error.verify_code, host)}"


def _advice(code: int, host: str) -> str:
    if code in _OTHER_NAME:
        return f"start the coordinator with --advertise {host}, or join again with a new bundle"
    if code in _OTHER_TIME:
        return "check the date of this device, and how long the broker's certificate is valid"
    if code in _OTHER_AUTHORITY:
        return (
            "it is not of the authority in this device's bundle: is that the right server? "
            "if it was set up anew, join again with a new bundle (coordinator device add NAME --replace)"
        )
    return "join again with a new bundle (coordinator device add NAME --replace)"
