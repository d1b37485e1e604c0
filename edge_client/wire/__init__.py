"""Bytes on the wire: frames, messages, chunks, containers of tensors, topics; every decoder refuses hostile input
with one error type. There are no sockets and no clock here; those are in `transport`.

May import: the leaves.
"""
