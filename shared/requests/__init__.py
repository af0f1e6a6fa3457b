"""What a request may ask for, and the one place where its limits are enforced."""
