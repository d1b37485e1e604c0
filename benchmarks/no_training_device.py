"""A real client daemon whose workers train nothing: `python -m benchmarks.no_training_device HOME NUM`.

The same modules, connection and loop as `edge-client start`; HOME holds `device.join` and `device.toml`. The workers of
the NUM devices beside each other wait for one another, see `no_training_worker`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from edge_client import logs
from edge_client.client import identity
from edge_client.client.run_daemon import run_daemon
from edge_client.config.device_file import load_device_file
from edge_client.transport.base import Event, Transport, Will, parse_broker_url
from edge_client.transport.mqtt import MqttTransport, tls_context
from edge_client.wire.topics import Topics


def main() -> None:
    """Run until SIGTERM."""
    logs.configure("plain", logs.Context())
    home = Path(sys.argv[1])
    bundle = identity.read_bundle(home / "device.join")
    url = parse_broker_url(bundle.brokers[0])
    state_topic = Topics(bundle.federation).device(bundle.device, "state")

    def connect(on_event: Callable[[Event], None], boot: str) -> Transport:
        return MqttTransport(
            host=url.host,
            port=url.port,
            name=bundle.device,
            on_event=on_event,
            password=bundle.password,
            tls=tls_context(bundle.ca) if url.tls else None,
            will=Will(topic=state_topic, payload=f"offline {boot}".encode()),
            boot_id=boot,
        )

    meeting = str(home.parent / "meeting")
    run_daemon(
        bundle=bundle,
        device_file=load_device_file(home / "device.toml"),
        state_dir=home / "state",
        connect=connect,
        worker_command=(sys.executable, "-m", "benchmarks.no_training_worker", meeting, sys.argv[2]),
        template_command=(sys.executable, "-m", "benchmarks.no_training_template", meeting, sys.argv[2]),
    )


if __name__ == "__main__":
    main()
