"""What every request passes before an endpoint has it, and every answer after."""
