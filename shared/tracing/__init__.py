"""Where a request's time goes."""
