"""No client waits for another one without end."""
