"""The columns of a step, made on the device."""
