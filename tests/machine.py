"""A machine with a systemd of the test's own: its root directory, its users, commands that write down what is asked.

`systemd-run` runs the command at once, as the test's user, unless a file `deny` names a property that stands in its
way; `useradd` writes into the machine's own list. Nothing outside of the folder is touched.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from rows import digest

from edge_client.client import identity
from edge_client.operate.device_service import ServiceOptions
from edge_client.operate.service_install import Programs
from edge_client.operate.systemd import Systemd

REPOSITORY = Path(__file__).parents[1]
BUNDLE = identity.Bundle(
    federation="fed", device="pi", brokers=("mqtt://127.0.0.1:1",), password="p" * 20, key=digest("pi")
)

_RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >> {log}\n'
_USERADD = 'for name; do :; done\necho "$name:x:{uid}:{gid}::/nonexistent:/usr/sbin/nologin" >> {root}/etc/passwd\n'
_RUN = """while read -r property check; do
    for word; do
        case "$word" in --property=$property=*)
            echo '{"ok": false, "checks": [{"check": "'"$check"'", "state": "failed", "text": "it cannot be read"}]}'
            exit 1 ;;
        esac
    done
done < DENY
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Machine:
    """The root of a system, and its commands first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "machine"
        self.systemd = Systemd(self.root)
        for name in ("etc/systemd/system", "run/systemd/system", "var/lib", "proc", "bin"):
            (self.root / name).mkdir(parents=True)
        (self.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
        (self.root / "proc/meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n")
        self._log, self.deny = folder / "asked", folder / "deny"
        self._log.touch()
        self.deny.touch()
        record = _RECORD.format(log=self._log)
        user = _USERADD.format(root=self.root, uid=os.geteuid(), gid=os.getegid())
        scripts = {"systemctl": "", "userdel": "", "useradd": user, "systemd-run": _RUN.replace("DENY", str(self.deny))}
        for name, text in scripts.items():
            script = self.root / "bin" / name
            script.write_text(record + text)
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.root / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        self.state_dir = self.root / "var/lib/fedfit/device"
        self.programs = Programs(python=self._python(), packages=(Path("/opt/fedfit"),))

    def _python(self) -> Path:
        """An interpreter outside of every home directory, that is the one of the tests."""
        python = self.root / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        return python

    def join(self, device_toml: str = 'data = { source = "digits" }\n') -> None:
        """Make it a device."""
        identity.join(self.state_dir, BUNDLE)
        (self.state_dir / "device.toml").write_text(device_toml)

    def wanted(self, **options: object) -> ServiceOptions:
        """What install-service was told."""
        return ServiceOptions(state_dir=self.state_dir, systemd=self.systemd, programs=self.programs, **options)  # type: ignore[arg-type]

    @property
    def unit(self) -> Path:
        return self.systemd.unit_path("fedfit-device")

    def asked(self) -> list[str]:
        """What was asked of the system, without the properties and paths of `systemd-run`."""
        lines = self._log.read_text().splitlines()
        return [line.partition(" --property")[0].replace(str(self.root), "") for line in lines]

    def files(self) -> dict[str, bytes]:
        """Everything on it."""
        found = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in found}
