"""What methods exchange beside weights: kinds of knowledge, their schema, and their limits. What is learnt from it
is up to each method in `methods`; what may leave the device, to `worker.privacy`.

May import: the leaves, config, wire.
"""
