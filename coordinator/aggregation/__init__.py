"""The child process that touches values: it makes, encodes, checks, folds and evaluates models. Jobs and
answers are records (`jobs`). `rounds` decides when a job is due; only the child loads torch.

May import: the leaves, store, broker, fleet, rounds, results; edge_client.
"""
