"""What a step made, on its way to the message that says it."""
