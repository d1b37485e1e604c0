"""What a device's operator needs: checks of the machine, the systemd service, the owner's files. The daemon that
the service runs is in `client`.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods,
measuring, worker, client.
"""
