"""The other services as a gateway sees them: who is there, how they are reached, and what it has asked of them."""
