"""The live page and its JSON API: what a fleet's owner looks at, and others may script.

A seat in the coordinator's loop holds the listening socket; its first visitor starts a thread with asyncio and h11,
which serves files, answers and events, and never touches what belongs to the loop.

May import: the leaves, store, broker, fleet, rounds, results, aggregation, report, conductor, server, requests;
edge_client.
"""
