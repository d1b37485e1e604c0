"""Many virtual devices on one machine, with the real coordinator, sessions and codec. The workers that train for
them run the same assignments as a device's.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report, conductor, server, requests;
edge_client.
"""
