"""What the formats have in common: text, literals, tags and JSON, read as they come."""
