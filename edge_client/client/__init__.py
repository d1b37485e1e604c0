"""The daemon on a device: connection, session, transfers, worker processes, deployed models, and what people see
of it. It never loads torch or numpy; training is in `worker`.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods,
measuring, worker.
"""
