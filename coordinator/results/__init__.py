"""What came of runs, as records and folders: for reports, comparisons and simulations that go on after a restart.
How it is shown is decided in `report` and `cli`.

May import: the leaves, store, broker; edge_client.
"""
