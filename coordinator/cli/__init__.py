"""The command `coordinator`: what a person types on a server, and the tables that come back. The work behind each
verb is in the themes below.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report, conductor, server, requests,
simulation, dashboard; edge_client.
"""
