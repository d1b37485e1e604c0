"""Pages, plots and comparisons of runs, made from records. What was measured comes from `results`; nothing in a
page is loaded from a network.

May import: the leaves, store, broker, fleet, rounds, results; edge_client.
"""
