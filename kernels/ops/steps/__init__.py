"""What a step brings to the device, and the columns that it makes of it."""
