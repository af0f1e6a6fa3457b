"""From a body to the requests that it stands for: fields, their checks, and the way to the service."""
