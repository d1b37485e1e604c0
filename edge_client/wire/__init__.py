"""Bytes on the wire: frames, messages, chunks, containers, topics. No sockets, no clock."""
