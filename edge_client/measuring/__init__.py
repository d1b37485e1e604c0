"""What training costs on this device: rows for each unit from real steps, trials, and the plans that
follow from them. The search itself is in `planning`; the process that trains is in `worker`.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods.
"""
