"""The only batch loop, with its optimizers, objectives, evaluation and depth-wise inference. What a method changes
in the loop is in `methods`.

May import: the leaves, config, wire, device, data, transport, knowledge, models.
"""
