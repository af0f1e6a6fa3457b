"""The other services as a gateway sees them: which are live, how they are reached, and what it has asked of them."""
