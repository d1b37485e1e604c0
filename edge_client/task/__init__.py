"""A user's own model and data: the `Task` record, reading one from a file that its owner named, and building the
model that a run trains. Built-in models and data sources are in `models` and `data`.

May import: the leaves, config, wire, device, data, transport, knowledge, models.
"""
