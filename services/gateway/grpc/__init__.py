"""The gRPC front: the servers' own services, and what every call passes before its message is read."""
