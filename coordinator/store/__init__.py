"""What the coordinator must never forget: runs, rounds, updates and models in SQLite, and backup and restore of
it. Nothing is decided here.

May import: the leaves; edge_client.
"""
