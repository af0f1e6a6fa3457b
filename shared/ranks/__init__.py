"""How ranks of a group reach each other beside the bus: messages and signs of life between a rank and its leader, and
what shows that both belong to one deployment.

The data of a step do not pass here: native code has them in shared memory, or reads and writes sockets itself.
"""
