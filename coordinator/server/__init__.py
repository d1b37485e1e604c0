"""The coordinator process: one loop over the broker's connection, the aggregator, and the people who ask. What
people may ask is in `requests`, which the launcher is handed.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report, conductor; edge_client.
"""
