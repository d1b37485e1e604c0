"""What the daemon does not load: it must stay small on a device that has little memory."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_client_loads_no_module_that_it_does_not_need() -> None:
    """http, email: of urllib.request, which paho imports; difflib: typos; sqlite3: 1.4 MB, shutil 0.5."""
    heavy = "('http.client', 'email', 'difflib', 'sqlite3', 'shutil', 'torch', 'numpy', 'onnxruntime', 'psutil')"
    assert _run(f"import sys, edge_client.cli.main; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_urllib_request_is_the_real_one_as_soon_as_it_is_used() -> None:
    """Through the package's attribute, through `import` and through `from ... import` alike."""
    code = """
import edge_client.transport.mqtt, sys, urllib.request
quote = urllib.request.pathname2url('/a b')
from urllib.request import Request
print(quote, Request('http://x/').host, sys.modules['urllib.request'].__file__.endswith('request.py'))
"""
    assert _run(code) == "/a%20b x True"
