"""What people ask of a running coordinator, and the answers: runs, devices, deployments, how things stand. The
socket that brings a request is in `control`; tables and pages are the work of `cli` and `report`.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report, conductor, server; edge_client.
"""
