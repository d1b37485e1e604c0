"""paho, imported without what it never uses here; the one module that imports it.

paho imports `urllib.request` for SOCKS proxies alone, and with it come http and email: 1.1 MB, in a daemon of 28. So,
before paho is imported, a stand-in takes its place that becomes the real module when something of it is used.
"""

from __future__ import annotations

import importlib
import sys
import types
import urllib
from typing import Any

_NAME = "urllib.request"


class _WhenUsed(types.ModuleType):
    """Has nothing of its own. (`importlib.util.LazyLoader` does not serve: `import` itself makes it load.)"""

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), attribute)


if _NAME not in sys.modules:
    sys.modules[_NAME] = urllib.request = _WhenUsed(_NAME)

from paho.mqtt import MQTTException  # noqa: E402  (after the stand-in)
from paho.mqtt import client as paho  # noqa: E402
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode  # noqa: E402
from paho.mqtt.reasoncodes import ReasonCode  # noqa: E402

__all__ = ["CallbackAPIVersion", "MQTTErrorCode", "MQTTException", "ReasonCode", "paho"]
