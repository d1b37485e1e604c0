"""Measurements of fedfit's spine: memory, transfer speed, bytes on the wire, restarts, many devices. See README.md."""
