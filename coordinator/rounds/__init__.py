"""Deciding, without I/O and without a clock: events in, instructions out. The instructions are carried out in
`conductor`; torch is never loaded here.

May import: the leaves, store, broker; edge_client.
"""
