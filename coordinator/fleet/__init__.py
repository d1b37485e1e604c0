"""The devices as the coordinator sees them: who is there, what each may send, transfers both ways, deployed
models. What a round asks of them is decided in `rounds`.

May import: the leaves, store, broker; edge_client.
"""
