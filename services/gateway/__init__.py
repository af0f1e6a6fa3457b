"""The front: gRPC and HTTP on one side, the troupe's messages on the other."""
