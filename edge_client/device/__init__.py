"""What this device is and what it may use: hardware, memory, budget, and the guards that keep a process inside it.
It does not know what is trained; plans are made in `planning`.

May import: the leaves, config, wire.
"""
