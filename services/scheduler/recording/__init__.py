"""Recording of what the core is asked, and playing it to a fresh core."""
