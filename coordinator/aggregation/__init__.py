"""The child process that touches values: it makes, encodes, checks, folds and judges models; jobs and answers are
records. When a job is due is decided in `rounds`; only the child loads torch.

May import: the leaves, store, broker, fleet, rounds, results; edge_client.
"""
