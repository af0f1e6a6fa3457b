"""What misuse of the gateway's doors costs other clients."""
