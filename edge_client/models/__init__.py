"""The built-in models and the contract that every model fulfils: units, taps, slices, recomputation. How much
memory a model takes is counted in `planning`; a user's own model is built in `task`.

May import: the leaves, config, wire, device, data, transport, knowledge.
"""
