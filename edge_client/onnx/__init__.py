"""Trained models as ONNX files: export, inference without torch, and the self-test of a deployed model. Which
model a device uses is kept in `client`.

May import: the leaves, config, wire, device, data, transport, knowledge, models, task, planning, training, methods,
measuring, worker, client, operate.
"""
