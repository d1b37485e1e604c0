"""The files that people write and how they are read: `device.toml`, `run.toml`, and where the files of tasks are.
What is done with a value is decided by the themes that read it.

May import: the leaves.
"""
