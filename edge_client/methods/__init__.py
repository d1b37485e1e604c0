"""One paper, one file, with both halves: the client half that the batch loop asks, and the server half that folds
updates. There is no network, disk or clock here; random generators are passed in.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training.
"""
