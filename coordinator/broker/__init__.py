"""The embedded MQTT broker as a child process, its certificates, and the access rules for somebody else's broker.
Messages are read and written in `server`.

May import: the leaves; edge_client.
"""
