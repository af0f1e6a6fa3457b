"""Models over several processes: parts of every weight, some of the layers, whole experts."""
