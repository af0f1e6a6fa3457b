"""Connections: uvicorn within the gateway's event loop, with a listener and bounds of our own."""
