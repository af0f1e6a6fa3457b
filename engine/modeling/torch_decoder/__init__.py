"""A described decoder in torch."""
