"""The front: gRPC streams on one side, the troupe's messages on the other."""
