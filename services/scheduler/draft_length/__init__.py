"""How many tokens to draft: what steps cost, what is accepted, and the choice."""
