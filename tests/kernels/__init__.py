"""Every kernel against its reference."""
