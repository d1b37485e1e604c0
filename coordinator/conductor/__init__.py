"""Carries out what `rounds` decides, for the active run: rows, blobs, jobs of the aggregator, messages to devices.
Connections and presence are in `server` and `fleet`.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report; edge_client.
"""
