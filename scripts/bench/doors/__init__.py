"""What clients that misuse the gateway's doors cost those who do not."""
