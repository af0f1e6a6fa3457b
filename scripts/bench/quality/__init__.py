"""What quantised weights cost in quality."""
