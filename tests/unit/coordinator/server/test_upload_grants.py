"""Updates are asked for as long as the disk has room for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from service_site import Site, with_run

from coordinator.server.upload_grants import UploadGrants
from edge_client.wire.chunks import CHUNK_BYTES
from edge_client.wire.messages import (
    Offer,
)


def test_no_update_is_asked_for_when_the_granted_bytes_would_eat_the_reserve(site: Site, tmp_path: Path) -> None:
    """4 chunks of 122,880 bytes are granted; with a reserve of all that is free but for 2 of them, nothing is left."""
    with_run(site)
    with site.serving() as service:
        offer = Offer(lease="lease-2", run="r-1", round=1, sha256="1" * 64, length=40 * CHUNK_BYTES, num_samples=3)
        service.uploads.expect("b", offer)
        service.grants.grant(0.0)
        granted = service.uploads.outstanding_bytes
        assert granted == 4 * CHUNK_BYTES
        assert service.paused == ""
        free = shutil.disk_usage(tmp_path).free
        reserve_bytes = free - granted // 2
        service.grants = UploadGrants(service.uploads, service.outbox, folder=tmp_path, reserve_bytes=reserve_bytes)
        service.grants.grant(0.1)
        assert service.paused.startswith("disk: ")
