"""The public gRPC interface: `pageant/v1/*.proto` and the stubs that `scripts/protos` makes of them."""
