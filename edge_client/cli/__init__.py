"""The command `edge-client`: what a person types on a device, and the verbs that need no module elsewhere. The
work behind each verb is in the themes below.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods,
measuring, worker, client, operate, onnx.
"""
