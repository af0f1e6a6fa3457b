"""A described decoder in native code."""
