"""The front: gRPC and HTTP on one side, the services' messages on the other."""
