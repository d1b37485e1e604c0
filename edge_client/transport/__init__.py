"""Connections to the broker, the in-memory twin of it for simulations, and the files of blobs on their way. What
the bytes mean is decided in `wire`; when to connect, in `client`.

May import: the leaves, config, wire.
"""
