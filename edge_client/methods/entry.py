"""`Entry`: the name by which users' files import `Card`, the card of a method."""

from __future__ import annotations

from edge_client.methods.card import Card as Entry

__all__ = ["Entry"]
