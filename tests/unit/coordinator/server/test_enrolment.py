"""Devices that are added, labelled and removed while the coordinator runs."""

from __future__ import annotations

import pytest
from raw_requests import answer
from service_site import Site, with_run

from coordinator.requests.devices import new_device
from edge_client.errors import ConflictError, NoSuchNameError


def test_a_removed_device_ends_its_leases_at_once(site: Site) -> None:
    """a's update is the quorum: with b's lease gone the round is frozen."""
    with_run(site)
    with site.serving() as service:
        assert answer(service, "device-remove", names=["b"]) == {"removed": ["b"], "external": False}
        assert site.leases()["b"] == ("cancelled", "removed")
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "FROZEN"
        assert site.users() == {"coordinator", "a"}
        with pytest.raises(NoSuchNameError, match="known: a"):
            answer(service, "device-remove", names=["a", "\ud800"])
        assert site.users() == {"coordinator", "a"}  # all, or none


def test_devices_are_enrolled_all_or_none(site: Site) -> None:
    """c is new, b is not: the store refuses both, and the broker lets nobody new in."""
    with site.serving() as service:
        with pytest.raises(ConflictError):
            service.enrolment.add([new_device("c"), new_device("b")])
        assert site.users() == {"coordinator", "a", "b"}
        assert service.roster.names() == ["a", "b"]
        service.enrolment.add([new_device("c")])
        assert site.users() == {"coordinator", "a", "b", "c"}
        assert service.roster.names() == ["a", "b", "c"]


def test_new_secrets_end_the_session_of_the_old_ones(site: Site) -> None:
    """a keeps its place in the list, and is not there until it says hello with its new key."""
    with site.serving() as service:
        site.hello("a", 1.0)
        service.enrolment.add([new_device("a")], replace=True)
        assert service.roster.names() == ["a", "b"]
        assert service.roster.presence("a") is None
