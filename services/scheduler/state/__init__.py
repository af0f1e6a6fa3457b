"""What every sequence, request and worker has."""
