"""One assignment in a process of its own: its inputs, its plan, the training inside the budget, and the update
that it writes. The daemon that starts and watches it is in `client`.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods,
measuring.
"""
