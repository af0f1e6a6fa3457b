"""Workers that Ray places."""
