"""Options, help pages, and the line that an error becomes."""
