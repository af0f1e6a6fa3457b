"""Which clients may ask a gateway, how much, and how soon it can be served."""
